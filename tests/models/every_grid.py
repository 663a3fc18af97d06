"""Every architecture on every grid against dense: logits, loss, all gradients, repeats and generated tokens.

    python tests/models/every_grid.py [--json bench/results/transformers.json] [--only Llama GPT2] [--grids "1D" ...]

Eight local ranks, small random models in fp32; a quarter of an hour on two idle cores.  `test_every_grid.py` runs each
architecture on one of the grids, of two or four ranks.  What is compared is in `against_dense.py`.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import tempfile
from datetime import date
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # of `products`

import against_dense
import architectures
import torch
import transformers
import transformers.modeling_layers
import transformers.modeling_utils  # so that ranks are forked with it

import ndtp
import ndtp.testing


def merged(rows: list[dict]) -> dict:
    """Of all ranks: the worst of each."""
    row = dict(rows[0])
    for case in ("plain", "masked"):
        if case in row:
            kinds = {}
            for kind in ("logits", "loss", "gradient"):
                kinds[kind] = max((each[case][kind] for each in rows), key=lambda found: found["factor"])
            row[case] = kinds | {"repeats": all(each[case]["repeats"] for each in rows)}
    row["failed"] = list(dict.fromkeys(text for each in rows for text in each["failed"]))
    return row


def line(row: dict) -> str:
    cases = [row[case] for case in ("plain", "masked") if case in row]
    factors = " ".join(f"{max(c[kind]['factor'] for c in cases):7.2f}" for kind in ("logits", "loss", "gradient"))
    tokens = {True: "same", False: "OTHER", None: "-"}[row.get("generation")]
    verdict = "; ".join(row["failed"]) or "ok"
    return f"{row['architecture']:32} {row['on']:22} {factors} {tokens:>6} {row['held']:6.1%}  {verdict}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="architectures whose names begin with one of these")
    parser.add_argument("--grids", nargs="*", default=list(against_dense.GRIDS), choices=list(against_dense.GRIDS))
    parser.add_argument("--json", type=Path, help="the record; other pairs in it are kept")
    arguments = parser.parse_args()
    rows, folder = [], Path(tempfile.mkdtemp(prefix="ndtp-campaign-"))
    print(f"{'model':32} {'grid':22} {'logits':>7} {'loss':>7} {'grads':>7} {'tokens':>6} {'held':>6}", flush=True)
    for name in architectures.ALL:
        if not name.startswith(tuple(arguments.only)):
            continue
        torch.save(against_dense.reference(name), folder / name)
        for grid in arguments.grids:
            try:
                row = merged(ndtp.testing.run(against_dense.compare_from, 8, args=(str(folder / name), name, grid)))
            except ndtp.testing.RankError as error:
                row = {"architecture": name, "on": grid, "failed": [str(error).splitlines()[0]]}
                print(f"{name:32} {grid:22} stopped: {row['failed'][0]}", flush=True)
                print(error, file=sys.stderr)
            else:
                print(line(row), flush=True)
            rows.append(row)
            if arguments.json is not None:
                write(arguments.json, rows)  # what was compared is kept if the rest is interrupted
    shutil.rmtree(folder)
    failed = [row for row in rows if row["failed"]]
    print(f"{len(rows) - len(failed)} of {len(rows)} agree with dense")
    sys.exit(1 if failed else 0)


def write(path: Path, rows: list[dict], ranks: int = 8) -> None:
    """The pairs of an architecture and a grid that a file of the same versions holds already are kept."""
    versions = {module.__name__: module.__version__ for module in (torch, transformers, ndtp)}
    limits = {"factor": against_dense.FACTOR, "floor_eps": against_dense.FLOOR_EPS, "close": against_dense.CLOSE}
    about = {"versions": versions | {"python": platform.python_version()}, "limits": limits}
    about |= {"ranks": ranks, "dtype": "float32"}
    found = {}
    if path.exists() and all((earlier := json.loads(path.read_text())).get(key) == about[key] for key in about):
        found = {(row["architecture"], row["on"]): row for row in earlier["rows"]}
    found |= {(row["architecture"], row["on"]): row for row in rows}
    about = {"date": str(date.today()), **about, "failed": sum(bool(row["failed"]) for row in found.values())}
    order = {name: i for i, name in enumerate(architectures.ALL)}
    text = ",\n  ".join(
        json.dumps(_rounded(row)) for row in sorted(found.values(), key=lambda r: order[r["architecture"]])
    )
    path.write_text(json.dumps(about, indent=1)[:-2] + f',\n "rows": [\n  {text}\n ]\n}}\n')


def _rounded(x):
    if isinstance(x, dict):
        return {key: _rounded(value) for key, value in x.items()}
    return float(f"{x:.4g}") if isinstance(x, float) else x


if __name__ == "__main__":
    main()
