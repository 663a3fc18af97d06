"""How models are counted, against the models themselves, for every config class of transformers at odd settings.

    python tests/planner/real_models.py [--only llama bart ...] [--jobs 2] [--write] [--record FILE.json]

Each class of configs is built without memory: as it is, with each of its fields at another value, as each of its model
classes, and with three fields changed at once.  In each such model ndtp counts blocks (`ndtp.models.counted`), torch
counts what its code multiplies (`counted_reference`), and what the config alone tells (`ndtp.planner.model_config`)
must be the same blocks, or a refusal.  `--write` takes the families that the config alone tells right, and writes
`ndtp/planner/model_families.json`.  `--record` adds to the classes that a record has already; each names the commit of
ndtp that gave it.  All of it: half an hour.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

from odd_settings import Case, cases, defaults, kinds

sys.path.append(str(Path(__file__).parents[1] / "models"))  # of `recorded`

from recorded import commit_of

import ndtp
from ndtp.errors import GridError
from ndtp.planner.model_config import EXPERTS, FFN, HEADS, HIDDEN, LAYERS, PARTS, READ, VOCABULARY, sizes_of
from ndtp.planner.model_families import TABLE, Family, families

# Sizes that a family is of no use without.
ESSENTIAL = (HIDDEN, FFN, LAYERS, HEADS, VOCABULARY)


def collect(kind: str) -> tuple[str, list[Case]]:
    """What is counted in the models of one class of configs, at all settings."""
    import transformers

    transformers.logging.set_verbosity_error()
    return kind, list(cases(kind, kinds()[kind]))


def alone(case: Case, known: Mapping[str, Family]) -> str:
    """What the config alone tells of a setting: "same", "refused", or what differs; as written, and as saved."""
    told = []
    for file in (case.file, case.saved):
        try:
            sizes = sizes_of(file, known=known)
        except GridError:
            told.append("refused")
            continue
        blocks: Counter[Any] = Counter()
        for block in sizes.blocks(1):
            blocks[replace(block, times=1)] += block.times
        if blocks != case.blocks:
            return f"{'nothing' if case.blocks is None else _short(case.blocks)}, by the config {_short(blocks)}"
        told.append("same")
    return "refused" if "refused" in told else "same"


def _short(blocks: Counter[Any]) -> str:
    return "; ".join(f"{times} {block.name} {block.hidden} {block.outs}" for block, times in blocks.items())


def family_of(kind: str, found: Sequence[Case], known: Mapping[str, Family]) -> Family | None:
    """How the configs of a kind are read right at every setting, but for those that are refused; None if not at all."""
    if not found or found[0].changed or found[0].blocks is None:
        return None
    best: tuple[int, Family] | None = None
    for family in _readings(kind, found[0]):
        told = [alone(case, {**known, kind: family}) for case in found]
        if told[0] == "same" and (best is None or told.count("same") > best[0]):
            best = told.count("same"), family
    return None if best is None else _with_unread(kind, best[1], found, known)


def _readings(kind: str, base: Case) -> Iterator[Family]:
    one = kinds()[kind]
    own = defaults(one)
    if any(isinstance(base.saved.get(part), dict) for part in PARTS):
        yield from (Family(around=True, headless=headless) for headless in (False, True))
        return
    read = {key: value for key, value in own.items() if key in READ}
    has_experts = any((base.saved.get(name) or 0) > 1 for name in EXPERTS if not isinstance(base.saved.get(name), list))
    choices: dict[str, tuple[bool, ...]] = {
        "gated": (False, True),
        "pair": (False, True) if base.saved.get("is_encoder_decoder") else (False,),
        "vocabulary": (True, False),
        "mixture": (has_experts,),
        "latent": (False, True) if has_experts else (False,),
        "fourfold": (False, True),
        "even_heads": (False, True),
        "headless": (False, True),
    }
    for flags in product(*choices.values()):
        yield Family(**dict(zip(choices, flags, strict=True)), defaults=read)  # type: ignore[arg-type]


def _with_unread(kind: str, family: Family, found: Sequence[Case], known: Mapping[str, Family]) -> Family | None:
    """The fields that change what is not read become ones that are refused; None where those are a family's sizes."""
    unread: dict[str, Any] = {}
    classes: list[str] = []
    for case in found:
        if len(case.changed) != 1 or not _differs(alone(case, {**known, kind: family})):
            continue
        (name,) = case.changed
        if name == "architectures":
            classes += case.file["architectures"]
        else:
            unread[name] = _usual(kind, name, found[0])
    sizes = {next((name for name in names if name in family.defaults), "") for names in ESSENTIAL}
    if sizes & unread.keys():
        return None
    family = replace(family, unread=unread, unread_classes=tuple(dict.fromkeys(classes)))
    return None if any(_differs(alone(case, {**known, kind: family})) for case in found) else family


def _usual(kind: str, path: str, base: Case) -> Any:
    """What a class takes for a field by itself."""
    first, _, inner = path.partition(".")
    if not inner:
        return defaults(kinds()[kind])[first]
    return defaults(kinds()[base.saved[first]["model_type"]])[inner]


def _differs(told: str) -> bool:
    return told not in ("same", "refused")


def chosen(found: Mapping[str, Sequence[Case]]) -> dict[str, Family]:
    """All families that are read right: those of text first, then those around them."""
    known: dict[str, Family] = {}
    for around in (False, True):
        for kind, each in found.items():
            nests = bool(each) and any(isinstance(each[0].saved.get(part), dict) for part in PARTS)
            if nests == around and (family := family_of(kind, each, known)):
                known[kind] = family
    return known


def record(found: Mapping[str, Sequence[Case]], known: Mapping[str, Family]) -> dict[str, Any]:
    """Numbers of settings: counted or refused, and by the config alone the same, refused or different."""
    rows, commit = {}, commit_of(Path(ndtp.__file__).parent)
    for kind, each in sorted(found.items()):
        told = [alone(case, known) for case in each]
        rows[kind] = {
            "settings": len(each),
            "counted": sum(case.blocks is not None for case in each),
            "refused": sum(case.blocks is None for case in each),
            "differ": [f"{case.changed}: {case.problem}" for case in each if case.blocks is not None and case.problem],
            "alone_same": told.count("same"),
            "alone_refused": told.count("refused"),
            "alone_differ": [f"{c.changed}: {text}" for c, text in zip(each, told, strict=True) if _differs(text)],
        }
        reason = next((case.problem.splitlines()[0][:120] for case in each[:1] if case.blocks is None), "")
        rows[kind] |= {"refused_as_it_is": reason, "commit": commit, "date": date.today().isoformat()}
    return rows


def told_of(rows: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return a record: the rows, and what they add up to."""
    import transformers

    totals: dict[str, Any] = {"config_classes": len(rows), "built": sum(bool(row["settings"]) for row in rows.values())}
    for key in ("settings", "counted", "refused", "differ", "alone_same", "alone_refused", "alone_differ"):
        totals[key] = sum(len(row[key]) if isinstance(row[key], list) else row[key] for row in rows.values())
    return {
        "transformers": transformers.__version__,
        "totals": totals,
        "rows": dict(sorted(rows.items())),
    }


def write(known: Mapping[str, Family]) -> None:
    lines = [f"  {json.dumps(kind)}: {json.dumps(known[kind].as_dict())}" for kind in sorted(known)]
    text = '{"written_by": "tests/planner/real_models.py", "families": {\n' + ",\n".join(lines) + "\n}}\n"
    TABLE.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--record", type=Path)
    arguments = parser.parse_args()
    found: dict[str, list[Case]] = {}
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for kind, each in pool.map(collect, arguments.only or sorted(kinds())):
            found[kind] = each
            wrong = [case for case in each if case.blocks is not None and case.problem]
            print(f"{kind}: {len(each)} settings" + "".join(f"\n  {c.changed}: {c.problem}" for c in wrong), flush=True)
    known = {**families(), **chosen(found)} if arguments.write else families()
    if arguments.write:
        write(known)
    result = told_of(record(found, known))
    if arguments.record and arguments.record.exists():
        result = told_of({**json.loads(arguments.record.read_text(encoding="utf-8"))["rows"], **result["rows"]})
    if arguments.record:
        arguments.record.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for kind, row in result["rows"].items():
        for text in row["alone_differ"]:
            print(f"{kind} by its config alone: {text}")
    print(json.dumps(result["totals"]))
    sys.exit(1 if result["totals"]["differ"] or result["totals"]["alone_differ"] else 0)


if __name__ == "__main__":
    main()
