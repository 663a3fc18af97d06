"""Families of models, by the `model_type` of their config, whose layers are known by the config alone.

`model_families.json` beside holds them.  `tests/planner/real_models.py` writes it: it compares what is read of each
config class of transformers, with each of its fields at odd values, with what is counted in the models themselves, and
takes the families whose every block is read right.  Others are refused by name.  Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from ndtp.errors import GridError
from ndtp.planner.fields import shown

INSTALL = "  fix: pip install --upgrade transformers, to count in the model itself"
TABLE = Path(__file__).with_name("model_families.json")


@dataclass(frozen=True)
class Family:
    """The rules by which configs of one `model_type` are read.

    Attributes:
        gated: MLPs have a gate beside their up projection.
        pair: an encoder and a decoder.
        vocabulary: there is an embedding.
        mixture: experts in some layers or all; latent: attention by latent vectors, which stays whole.
        fourfold: four times the hidden size where a file names no inner size.
        even_heads: heads share the hidden size evenly, whatever the file names as theirs.
        headless: no head where the file names no class.
        around: the layers are those of the text part, which is of another family.
        defaults: what the config class takes for a field that a file leaves out.
        unread: fields whose other values change layers in ways that are not read.
        unread_classes: likewise, classes of `architectures`.
    """

    gated: bool = False
    pair: bool = False
    vocabulary: bool = True
    mixture: bool = False
    latent: bool = False
    fourfold: bool = False
    even_heads: bool = False
    headless: bool = False
    around: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    unread: Mapping[str, Any] = field(default_factory=dict)
    unread_classes: tuple[str, ...] = ()

    def refuse_unread(self, config: Mapping[str, object], what: str) -> None:
        """Refuse fields that the family does not read.

        Raises:
            GridError: such a field, at another value than the class's own.
        """
        for path, usual in self.unread.items():
            value: object = config
            for key in path.split("."):
                value = value.get(key, usual) if isinstance(value, Mapping) else usual
            if value != usual:
                kind = shown(config.get("model_type"))
                raise GridError(
                    f"{what}: {path}={shown(value)} of model_type={kind}; by the config alone {path}={shown(usual)} is "
                    f"known\n{INSTALL}"
                )

    def as_dict(self) -> dict[str, Any]:
        """Return the entries in which the family differs from one without rules of its own."""
        plain = Family()
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != getattr(plain, f.name)}


@cache
def families() -> Mapping[str, Family]:
    """Return all families by `model_type`."""
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    return {
        kind: Family(**entry | {"unread_classes": tuple(entry.get("unread_classes", ()))})
        for kind, entry in table["families"].items()
    }
