"""The choice of a product's configuration: a tuned table first, then the roof model among the shipped candidates.

The choice depends on nothing but the problem, the chip and the table, so ranks that load the same table agree;
`Table.fingerprint` lets them make sure.  Nothing is tuned while a program runs.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from ndtp_kernels.choice import roof
from ndtp_kernels.choice.chips import Chip, chip_named
from ndtp_kernels.choice.problem import TORCH, Config, Problem


class Candidate(NamedTuple):
    """A configuration, and the kinds of problem that it compiles for without spilling (see `aot`)."""

    config: Config
    kinds: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Table:
    """Hashed by identity.  Candidates by target and dtype, and tuned choices by chip, dtype and shape class."""

    candidates: Mapping[str, Mapping[str, tuple[Candidate, ...]]] = field(default_factory=dict)
    tuned: Mapping[str, Mapping[str, Mapping[str, Config]]] = field(default_factory=dict)

    @classmethod
    def from_json(cls, text: str) -> Table:
        stored = json.loads(text)
        return cls(
            {
                target: {
                    dtype: tuple(
                        Candidate(Config(**{k: v for k, v in c.items() if k != "kinds"}), tuple(c["kinds"].split()))
                        for c in configs
                    )
                    for dtype, configs in by_dtype.items()
                }
                for target, by_dtype in stored.get("candidates", {}).items()
            },
            {
                chip: {
                    dtype: {shape: Config(**entry) for shape, entry in by_shape.items()}
                    for dtype, by_shape in by_dtype.items()
                }
                for chip, by_dtype in stored.get("tuned", {}).items()
            },
        )

    def to_json(self) -> str:
        return json.dumps(
            {
                "candidates": {
                    target: {
                        dtype: [{**c.config.to_json(), "kinds": " ".join(c.kinds)} for c in configs]
                        for dtype, configs in by_dtype.items()
                    }
                    for target, by_dtype in self.candidates.items()
                },
                "tuned": {
                    chip: {
                        dtype: {shape: entry.to_json() for shape, entry in sorted(by_shape.items())}
                        for dtype, by_shape in by_dtype.items()
                    }
                    for chip, by_dtype in self.tuned.items()
                },
            },
            indent=1,
        )

    def with_tuned(self, tuned: Mapping[str, Mapping[str, Mapping[str, Config]]]) -> Table:
        """Return the table with entries of `tuned` in the place of its own; candidates stay."""
        merged = {chip: {d: dict(s) for d, s in by_dtype.items()} for chip, by_dtype in self.tuned.items()}
        for chip, by_dtype in tuned.items():
            for dtype, by_shape in by_dtype.items():
                merged.setdefault(chip, {}).setdefault(dtype, {}).update(by_shape)
        return replace(self, tuned=merged)

    def fingerprint(self) -> str:
        """Equal on ranks that will make equal choices."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]


@functools.cache
def shipped_table() -> Table:
    return Table.from_json(resources.files("ndtp_kernels.choice").joinpath("configs.json").read_text())


def user_cache() -> Path:
    return Path.home() / ".cache" / "ndtp" / "gemm.json"


@functools.cache
def default_table() -> Table:
    """The shipped table, extended by the user's cache as it was when this process first asked."""
    path = user_cache()
    if not path.exists():
        return shipped_table()
    return shipped_table().with_tuned(Table.from_json(path.read_text()).tuned)


def fits(problem: Problem, config: Config, chip: Chip) -> bool:
    """Return whether `config` can run `problem` on `chip` at all."""
    if config.kernel == "torch":
        return True
    if roof.shared_bytes(problem, config, chip) > chip.shared_bytes:
        return False
    if config.kernel == "pointer":
        return True
    if not (chip.has_tma and problem.tma):
        return False
    tile = (config.block_m, config.block_n, config.block_k)
    return all(block == 0 or block % size == 0 for block, size in zip(problem.blocks, tile, strict=True))


def candidates(problem: Problem, chip: Chip, table: Table) -> list[Config]:
    """torch, and every shipped configuration that fits, whole and with K split where M x N leaves SMs idle."""
    by_dtype = table.candidates.get(chip.target) or table.candidates.get(_family(chip.target), {})
    found = [TORCH]
    for config, kinds in by_dtype.get(_dtype_class(problem.dtype), ()):
        if problem.kind not in kinds or not fits(problem, config, chip):
            continue
        found.append(config)
        if config.warp_specialize or problem.kind.startswith("grouped"):
            continue
        tiles = problem.batch * roof.cdiv(problem.m, config.block_m) * roof.cdiv(problem.n, config.block_n)
        steps = roof.cdiv(problem.k, config.block_k)
        for split in (2, 4, 8, 16):
            if tiles * split <= 2 * chip.num_sms and steps // split >= 4:
                found.append(replace(config, split_k=split))
    return found[1:] if len(found) > 1 and not torch_will_do(problem) else found


def torch_will_do(problem: Problem) -> bool:
    """Return whether torch serves as well as a kernel, if it is fast enough.

    Its GEMMs take every SM and keep it: they leave none to a collective.
    """
    return not problem.sms_to_leave


def _family(target: str) -> str:
    """Return the target whose candidates a target without its own uses."""
    if target.startswith("gfx"):
        return "gfx942"
    return {"sm_103": "sm_100"}.get(target, "sm_89")


def _dtype_class(dtype: str) -> str:
    return {"float16": "half", "bfloat16": "half", "float32": "fp32"}[dtype]


@functools.lru_cache(maxsize=4096)
def _choose(problem: Problem, chip: Chip, table: Table) -> Config:
    entry = table.tuned.get(chip.name, {}).get(problem.dtype, {}).get(problem.shape_class)
    if entry is not None and fits(problem, entry, chip) and (entry != TORCH or torch_will_do(problem)):
        return entry
    return min(candidates(problem, chip, table), key=lambda config: roof.estimate(problem, config, chip).seconds)


def choose_for(problem: Problem, chip: Chip, table: Table | None = None) -> Config:
    """The configuration of `problem`: the table's entry if it fits, else the fastest candidate of the roof model."""
    return _choose(problem, chip, table or default_table())


def choose(
    m: int,
    n: int,
    k: int,
    dtype: str = "bfloat16",
    chip: str | Chip = "h200",
    *,
    table: Table | None = None,
    **problem: Any,
) -> Config:
    """The configuration of an M x N x K product; `problem` takes any other field of `Problem`."""
    on = chip_named(chip) if isinstance(chip, str) else chip
    return choose_for(Problem(m, n, k, dtype, **problem), on, table)


def explain(
    m: int,
    n: int,
    k: int,
    dtype: str = "bfloat16",
    chip: str | Chip = "h200",
    *,
    table: Table | None = None,
    **problem: Any,
) -> dict[str, Any]:
    """Explain how a product runs: the choice, its source, and every candidate with its estimate, best first."""
    on = chip_named(chip) if isinstance(chip, str) else chip
    table = table or default_table()
    asked = Problem(m, n, k, dtype, **problem)
    chosen = choose_for(asked, on, table)
    entry = table.tuned.get(on.name, {}).get(dtype, {}).get(asked.shape_class)
    rows = []
    for config in candidates(asked, on, table):
        cost = roof.estimate(asked, config, on)
        rows.append(
            {
                "config": str(config),
                "estimated_us": round(cost.seconds * 1e6, 2),
                "estimated_tflops": round(cost.tflops, 1),
                "tiles": cost.tiles,
                "waves": round(cost.waves, 3),
                "bound": cost.bound,
                "chosen": config == chosen,
            }
        )
    return {
        "problem": asdict(asked),
        "chip": on.name,
        "shape_class": asked.shape_class,
        "choice": str(chosen),
        "source": "tuned" if entry is not None and entry == chosen else "roof model",
        "table": table.fingerprint(),
        "candidates": sorted(rows, key=lambda row: row["estimated_us"]),  # type: ignore[arg-type,return-value]
    }
