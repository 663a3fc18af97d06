"""`Hardware`: what a time model has to know of a machine.  Presets by name, and TOML files of the user's own.  Pure.

Presets (`ndtp.planner.presets`) come from published measurements; `ndtp bench calibrate` writes a file that was
measured on the ranks at hand.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from ndtp.dtypes import SIZES
from ndtp.errors import GridError
from ndtp.planner.fields import Either, Entries, Fields, Kind, Number, Size, Word, read_parsed, shown
from ndtp.planner.presets import MACHINES
from ndtp.schedule.host import EAGER, HostLane

PUBLISHED = "published measurements"
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
MAX_RANKS = 2**20

# What each field of a profile may be.  Rates have a floor above 0: 1 / rate is a time.
RATE, DURATION_US = Number(1e-9, 1e12), Number(0, 1e12)
FRACTION = Number(1e-9, 1)
DTYPE_BYTES = {**SIZES, "float8": 1}  # that a product may have
LINK = Fields(
    {
        "bandwidth_gbs": RATE,
        "latency_us": DURATION_US,
        "hop_us": DURATION_US,
        "efficiency": Entries(Word(COLLECTIVES), Either(FRACTION, Entries(Size(MAX_RANKS), FRACTION)), empty=True),
    },
    required=("bandwidth_gbs",),
)
MACHINE: dict[str, Kind] = {
    "name": Word(),
    "ranks_per_node": Number(1, MAX_RANKS, integer=True),
    "tflops": Entries(Word(tuple(DTYPE_BYTES)), RATE),
    "peak_tflops": Entries(Word(tuple(DTYPE_BYTES)), RATE, empty=True),
    "attention_tflops": Entries(Word(), RATE, empty=True),
    "gemm_half": Number(0, 1e9),
    "memory_gib": RATE,
    "memory_gbs": RATE,
    "launch_us": DURATION_US,
    "contention": Number(0, 1),
    "host": Number(0, 1000),
    "source": Word(),
}
PROFILE = Fields(
    {**MACHINE, "intra": LINK, "inter": LINK, "measured": Entries(Word(), Kind(), empty=True)},
    required=("ranks_per_node", "tflops"),
)


@dataclass(frozen=True)
class Link:
    """The connection of a rank to its peers. A collective over p ranks that makes a rank receive b bytes takes
    `latency_us + (p - 1) hop_us + b / (bandwidth x efficiency[collective])`.

    Attributes:
        bandwidth_gbs: GB/s that one rank receives, and sends at the same time.
        latency_us: fixed cost of a call.
        hop_us: cost of each of the p - 1 exchanges.
        efficiency: collective -> fraction of the bandwidth that it reaches, or group size -> fraction, where a size
            that is not named takes that of the next smaller one; 1 where a collective is not named.
    """

    bandwidth_gbs: float
    latency_us: float = 10.0
    hop_us: float = 1.0
    efficiency: Mapping[str, float | Mapping[int, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        LINK.check("Link", "", vars(self))
        tables = {
            name: {int(size): reached for size, reached in sorted(each.items(), key=lambda item: int(item[0]))}
            if isinstance(each, Mapping)
            else each
            for name, each in self.efficiency.items()
        }
        object.__setattr__(self, "efficiency", tables)

    def seconds_per_byte(self, collective: str, ranks: Any) -> Any:
        """Return the seconds that a byte takes in a group of `ranks` ranks, or in an array of such sizes."""
        reached: Any = self.efficiency.get(collective, 1.0)
        if isinstance(reached, Mapping):
            nearest = np.searchsorted(list(reached), ranks, side="right") - 1
            reached = np.array(list(reached.values()))[np.maximum(nearest, 0)]
        return 1e-9 / (self.bandwidth_gbs * reached)


@dataclass(frozen=True)
class Hardware:
    """A cluster of nodes with the same number of ranks each, numbered node by node.

    Attributes:
        ranks_per_node: devices of a node, one rank each.
        intra, inter: the link of a rank inside of its node, and its share of the node's link to the others.
        tflops: dtype -> rate of large matrix products.
        gemm_half: a dim of this size costs a product half of its rate: each dim d contributes d / (d + gemm_half).
        memory_gib, memory_gbs: a rank's device memory, and the rate at which it is read and written.
        launch_us: fixed cost of a local product.
        contention: how much of the time of a collective that runs beside products these lose by it: 0 where a card
            moves the bytes, 1 where processors do, and nothing is hidden.
        host: for how long its host works to issue tasks to a device, by the host of `ndtp.schedule.host`; 0 where the
            processors that issue also compute.
        peak_tflops: dtype -> the data sheet's rate, of which utilisation (MFU) is a part; where it lacks one, `tflops`.
        attention_tflops: kernel ("flash1", "flash2", "flash3") -> rate of long causal attention with heads of 128,
            forward and backward, at 3.5 flops backward and forward for each one of forward.
        source: where the figures come from.
    """

    name: str
    ranks_per_node: int
    intra: Link
    inter: Link
    tflops: Mapping[str, float]
    gemm_half: float = 96.0
    memory_gib: float = 80.0
    memory_gbs: float = 2000.0
    launch_us: float = 5.0
    contention: float = 0.0
    host: float = 0.0
    peak_tflops: Mapping[str, float] = field(default_factory=dict)
    attention_tflops: Mapping[str, float] = field(default_factory=dict)
    source: str = PUBLISHED

    def __post_init__(self) -> None:
        Fields(MACHINE).check("Hardware", "", {name: getattr(self, name) for name in MACHINE})
        for name in ("intra", "inter"):
            if not isinstance(getattr(self, name), Link):
                raise GridError(f"Hardware: {name}={shown(getattr(self, name))}; it must be a Link")

    def flops_per_second(self, dtype: str) -> float:
        """Return the sustained rate of products in a dtype.

        Raises:
            GridError: a dtype for which the profile has no rate.
        """
        if dtype not in self.tflops:
            raise GridError(f"hardware {self.name!r} has no GEMM rate for {dtype}; it has {', '.join(self.tflops)}")
        return self.tflops[dtype] * 1e12

    @property
    def host_lane(self) -> HostLane | None:
        """The lane of the host in an eager step."""
        return EAGER.scaled(self.host) if self.host else None

    def half(self, dtype: str) -> float:
        """The dim at which a product of this dtype has half of its rate: the faster, the larger."""
        return self.gemm_half * max(1.0, self.tflops[dtype] / self.tflops.get("bfloat16", self.tflops[dtype]))

    def attention_rate(self, kernel: str, wide: str = "") -> float:
        """Flops a second of an attention core of one kind; of an unknown one, half of a product's.

        Args:
            wide: a dtype of more than 16 bits, whose cores are no faster than its products.
        """
        if wide:
            return min(self.attention_rate(kernel), self.flops_per_second(wide))
        known = self.attention_tflops
        if kernel == "fused" and known:
            return max(known.values()) * 1e12
        dtype = "bfloat16" if "bfloat16" in self.tflops else next(iter(self.tflops))
        return known[kernel] * 1e12 if kernel in known else 0.5 * self.flops_per_second(dtype)

    def peak(self, dtype: str) -> float:
        """Flops a second that utilisation (MFU) is measured by."""
        return self.peak_tflops[dtype] * 1e12 if dtype in self.peak_tflops else self.flops_per_second(dtype)

    def limited(self, power: float) -> Hardware:
        """Return the same devices under a lower power limit, a fraction `power` of theirs.

        Near its limit a chip's power grows faster than its clock, by its square at least: what it multiplies falls by
        the root of the power.
        """

        def slower(rates: Mapping[str, float]) -> dict[str, float]:
            return {key: rate * power**0.5 for key, rate in rates.items()}

        return replace(self, tflops=slower(self.tflops), attention_tflops=slower(self.attention_tflops))

    @classmethod
    def load(cls, name: str | Path | Hardware) -> Hardware:
        """A preset by name, or a profile from a TOML file (any name that ends in .toml).

        Raises:
            GridError: no such preset, or a file without the fields of a profile; names the nearest ones.
        """
        if isinstance(name, Hardware):
            return name
        if str(name).endswith(".toml"):
            return _read(Path(name))
        if str(name) not in PRESETS:
            near = difflib.get_close_matches(str(name), PRESETS, 3, 0.3)
            raise GridError(
                f"hardware {str(name)!r} is not a preset"
                + (f"; did you mean {' or '.join(near)}?" if near else "")
                + f"\n  presets: {', '.join(PRESETS)}\n  or the path of a .toml file; `ndtp bench calibrate` writes one"
            )
        return PRESETS[str(name)]

    def to_toml(self) -> str:
        """The text of a file that `load` reads."""
        lines = [f"{name} = {_toml(getattr(self, name))}" for name in SCALARS]
        for name in TABLES:
            if table := getattr(self, name):
                lines += ["", f"[{name}]", *(f"{key} = {_toml(rate)}" for key, rate in table.items())]
        for name in ("intra", "inter"):
            link: Link = getattr(self, name)
            lines += ["", f"[{name}]"]
            lines += [f"{key} = {_toml(getattr(link, key))}" for key in ("bandwidth_gbs", "latency_us", "hop_us")]
            if link.efficiency:
                lines += ["", f"[{name}.efficiency]"]
                lines += [f"{key} = {_toml(value)}" for key, value in link.efficiency.items()]
        return "\n".join(lines) + "\n"


TABLES = ("tflops", "peak_tflops", "attention_tflops")
_RATES = ("gemm_half", "memory_gib", "memory_gbs", "launch_us", "contention", "host")
SCALARS = ("name", "ranks_per_node", *_RATES, "source")


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, str):  # JSON escapes what TOML wants escaped, but for this one
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int):
        return repr(value)
    text = f"{float(value) + 0.0:.6g}"  # -0.0 is 0.0
    return text + ".0" * text.isdigit()


def _read(path: Path) -> Hardware:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    what = f"hardware profile {path}"
    written_by = f"`ndtp bench calibrate --output {path}` writes it"
    table = read_parsed("hardware profile", path, "TOML", tomllib.loads, written_by)
    links = {name: table[name] for name in ("intra", "inter") if name in table}
    if problem := PROFILE.problem("", table):
        raise GridError(f"{what}: {problem}")
    if not links:
        raise GridError(f"{what}: lacks intra or inter; it must be a table with {', '.join(LINK.fields)}")
    both = {name: Link(**(links.get(name) or next(iter(links.values())))) for name in ("intra", "inter")}
    return Hardware(**{
        "name": path.stem, "source": path.name, **{key: table[key] for key in table if key in MACHINE}, **both,
    })  # fmt: skip


def _preset(intra: tuple[float, float, float], inter: tuple[float, float, float], **fields: Any) -> Hardware:
    return Hardware(intra=Link(*intra), inter=Link(*inter), **fields)


PRESETS = {each["name"]: _preset(**each) for each in MACHINES}
