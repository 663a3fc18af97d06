"""The files of `ndtp bench overlap`: --trace and --plot."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ndtp.cli.common import writing

if TYPE_CHECKING:
    from ndtp.measure.overlap_trace import RankTrace


def write_pictures(out: Any, traces: Sequence[RankTrace], title: str, trace: Path | None, plot: Path | None) -> None:
    """Write the trace and the picture, where they were asked for."""
    from ndtp.measure.overlap_picture import draw
    from ndtp.measure.overlap_trace import chrome_trace

    if trace is not None:
        with writing(trace):
            trace.write_text(json.dumps(chrome_trace(traces)))
        out.print(f"wrote {trace}: open it in ui.perfetto.dev or chrome://tracing", highlight=False)
    if plot is not None:
        with writing(plot):
            draw(traces, title, plot)
        out.print(f"wrote {plot}", highlight=False)
