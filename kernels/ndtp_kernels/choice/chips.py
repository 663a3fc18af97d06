"""The figures of a chip that the kernels need. Plain numbers: importing this touches no driver."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch


@dataclass(frozen=True)
class Chip:
    """One accelerator.  Rates are what a large GEMM reaches where that was measured, not the data sheet's peaks."""

    name: str
    target: str  # sm_90, gfx942 ..: what kernels are compiled for
    num_sms: int
    shared_bytes: int  # that one block may use
    bandwidth: float  # bytes / s
    flops: Mapping[str, float] = field(hash=False)  # by dtype, per second
    measured: bool = False

    @property
    def has_tma(self) -> bool:
        return self.target in ("sm_90", "sm_100", "sm_103", "interpreter")


def rates(half: float, single: float) -> dict[str, float]:
    return {"float16": half, "bfloat16": half, "float32": single}


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("a100", "sm_80", 108, 166912, 1.4e12, rates(0.27e15, 18e12)),
        Chip("l40s", "sm_89", 142, 101376, 0.75e12, rates(0.30e15, 60e12)),
        Chip("h100", "sm_90", 132, 232448, 2.8e12, rates(0.70e15, 50e12)),
        # 769-798 TFLOP/s at 8192^3 in bf16 and copies at 4.3 TB/s were measured; the other rates scale with them.
        Chip("h200", "sm_90", 132, 232448, 4.3e12, rates(0.79e15, 50e12), measured=True),
        Chip("b200", "sm_100", 148, 232448, 6.5e12, rates(1.6e15, 70e12)),
        Chip("mi300x", "gfx942", 304, 65536, 4.0e12, rates(0.6e15, 80e12)),
    )
}

# Triton's interpreter on a CPU: three processors, so that tiles are shared out among programs there, too.
INTERPRETER = Chip("interpreter", "interpreter", 3, 1 << 30, 1e9, dict.fromkeys(("bfloat16", "float32"), 1e9))


def chip_named(name: str) -> Chip:
    if name not in CHIPS:
        raise ValueError(f"chip {name!r} is not known\n  fix: one of {', '.join(CHIPS)}")
    return CHIPS[name]


@functools.cache
def detect(device: torch.device) -> Chip | None:
    """The chip of `device`, with its own number of SMs; None for a CPU.  An unknown chip gets a relative's rates."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        target = properties.gcnArchName.split(":")[0]
    else:
        target = f"sm_{properties.major}{properties.minor}"
    label = properties.name.lower().replace(" ", "")
    same = [chip for chip in CHIPS.values() if chip.target == target]
    named = [chip for chip in CHIPS.values() if chip.name in label and chip.target == target]
    # sm_86 and sm_120 have little shared memory, as sm_89 has; sm_103 is a larger sm_100.
    near = {"sm_86": "l40s", "sm_120": "l40s", "sm_121": "l40s", "sm_103": "b200"}.get(target, "a100")
    chip = (named or same or [CHIPS[near]])[0]
    return replace(chip, target=target, num_sms=properties.multi_processor_count)
