"""Machines by name: what chips and networks reach, as published.  Pure.

Rates of products are Bekman's measurements ("Machine Learning Engineering", table of maximum achievable matmul FLOPS),
times what a training step sustains of them.  That part, what links and memories reach of their data sheets, and what
products lose beside collectives were fitted to half of the published steps in `bench/published.toml`.  Attention is
that of the FlashAttention papers (2, 3).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Fitted: see `bench/published.py`.
NVLINK_REACHES = 0.78  # of a device's links to the others of its node, by NCCL
NETWORK_REACHES = 0.85
MEMORY_REACHES = 0.84
CONTENTION = 0.5  # of a collective's time that products beside it lose
GEMM_HALF = 100.0  # the dim at which a product has half of its rate


@dataclass(frozen=True)
class Device:
    """The figures of one kind of device.

    Attributes:
        bf16, fp8: TFLOP/s of large products that a training step sustains; 0: has none.
        peak, peak32: the data sheet's TFLOP/s, in bf16 and fp32; 0: what is sustained stands for it.
        memory_gib, memory_gbs: the memory of the data sheet.
        near_gbs: the bandwidth to the other devices of its node, in one direction.
        attention: see `Hardware.attention_tflops`.
        per_node: the number of devices of a node.
    """

    bf16: float
    peak: float
    fp32: float
    memory_gib: float
    memory_gbs: float
    near_gbs: float
    fp8: float = 0.0
    attention: dict[str, float] = field(default_factory=dict)
    per_node: int = 8
    peak32: float = 0.0


HOPPER = {"flash1": 173.0, "flash2": 330.0, "flash3": 513.0}
BLACKWELL = {"flash2": 500.0, "flash3": 1100.0}

DEVICES = {
    # Sustained: fitted.  271 and 795 TFLOP/s were measured of single products in bf16, 1403 in fp8.
    "a100": Device(245.0, 312.0, 17.0, 80.0, 2039.0, 300.0, attention={"flash1": 105.0, "flash2": 173.0}, peak32=19.5),
    "h100": Device(610.0, 989.0, 50.0, 80.0, 3350.0, 450.0, 1105.0, HOPPER, peak32=67.0),
    # Measured of single products: 795, 829, 1745, 1822 in bf16; 1453, 1535, 3433, 3616 in fp8.  Sustained: as an H100.
    "h200": Device(610.0, 989.0, 50.0, 141.0, 4800.0, 450.0, 1145.0, HOPPER, peak32=67.0),
    "gh200": Device(636.0, 989.0, 50.0, 96.0, 4000.0, 450.0, 1209.0, HOPPER, per_node=4, peak32=67.0),
    "b200": Device(1340.0, 2250.0, 60.0, 180.0, 8000.0, 900.0, 2704.0, BLACKWELL),
    # 72 share a rack, of which jobs of powers of two take 64.
    "gb200": Device(1399.0, 2500.0, 60.0, 186.0, 8000.0, 900.0, 2848.0, BLACKWELL, per_node=64),
    # Measured: 668 and 147 (one of two dies); sustained is assumed to be 0.8 of it.
    "mi300x": Device(535.0, 1307.0, 100.0, 192.0, 5300.0, 448.0, peak32=163.4),
    "mi250x": Device(118.0, 191.5, 38.0, 64.0, 1638.0, 150.0),
    # Not measured: three quarters of the data sheet.
    "v100": Device(94.0, 125.0, 14.0, 32.0, 900.0, 150.0, peak32=15.7),
}
# Gbit/s of a device's share of its node's network, latency of a call and of a hop in us; of other devices the last.
FABRICS = {
    "ib": ({"a100": 200.0, "v100": 100.0, "": 400.0}, 25.0, 2.0),
    "roce": ({"a100": 200.0, "v100": 100.0, "": 400.0}, 30.0, 3.0),
    "slingshot": ({"mi250x": 100.0, "": 200.0}, 30.0, 3.0),
    "eth": ({"": 12.5}, 50.0, 20.0),  # one 100 Gbit/s card for the eight devices of a node
}
LATENCY_US, HOP_US = 15.0, 1.0  # inside of a node


def device_in(text: str) -> str:
    """Return the device of this table that a driver's name of one has in it ("NVIDIA H100 80GB HBM3"); "" if none."""
    return max((name for name in DEVICES if name in text.lower()), key=len, default="")


def fields_of(name: str, fabric: str) -> dict[str, object]:
    """Return the fields of `ndtp.planner.hardware.Hardware`, links included, for a preset."""
    device = DEVICES[name]
    rates, latency, hop = FABRICS[fabric]
    fp8 = {"float8": device.fp8} if device.fp8 else {}
    peaks = {"bfloat16": device.peak, "float16": device.peak, **({"float8": 2 * device.peak} if device.fp8 else {})}
    peaks |= {"float32": device.peak32} if device.peak32 else {}
    return {
        "name": f"{name}-{fabric}",
        "ranks_per_node": device.per_node,
        "intra": (device.near_gbs * NVLINK_REACHES, LATENCY_US, HOP_US),
        "inter": (rates.get(name, rates[""]) / 8 * NETWORK_REACHES, latency, hop),
        "tflops": {"bfloat16": device.bf16, "float16": device.bf16, "float32": device.fp32, **fp8},
        "gemm_half": GEMM_HALF,
        "memory_gib": device.memory_gib,
        "memory_gbs": device.memory_gbs * MEMORY_REACHES,
        "contention": CONTENTION,
        "host": 1.0,
        "peak_tflops": peaks,
        "attention_tflops": device.attention,
    }


MACHINES: tuple[dict[str, Any], ...] = (
    *(fields_of(device, fabric) for device in DEVICES for fabric in FABRICS),
    {
        "name": "pcie",  # eight L40S on PCIe 4 x16, one 100 Gbit/s card
        "ranks_per_node": 8,
        "intra": (16.0, 15.0, 3.0),
        "inter": (1.25, 50.0, 20.0),
        "tflops": {"bfloat16": 290.0, "float16": 290.0, "float32": 73.0},
        "memory_gib": 48.0,
        "memory_gbs": 780.0,
        "host": 1.0,
    },
    {
        "name": "cpu",  # one rank a node, 25 Gbit/s Ethernet, gloo
        "ranks_per_node": 1,
        "intra": (2.5, 100.0, 50.0),
        "inter": (2.5, 100.0, 50.0),
        "tflops": {"float32": 2.0, "bfloat16": 2.0, "float16": 0.5, "float64": 1.0},
        "memory_gib": 256.0,
        "memory_gbs": 200.0,
        "launch_us": 2.0,
        "gemm_half": 32.0,
    },
)
