"""`ndtp bench calibrate`: the fit finds what samples were made of, and the file can be planned with."""

import json

import pytest

from ndtp.errors import GridError
from ndtp.measure.calibrate import COLLECTIVES, CalibrationJob, GemmSample, LinkSample, Samples, fit, fit_gemm, fit_link
from ndtp.planner.hardware import Hardware, Link
from ndtp.planner.search import plan
from ndtp.planner.time_model import gemm_seconds


def link_samples(latency=200e-6, hop=30e-6, per_byte=2e-9, scatter=3e-9):
    for size, stride in ((2, 1), (4, 1), (2, 2), (8, 1), (2, 4)):
        for name in COLLECTIVES:
            for received in (2**12, 2**16, 2**20):
                each = scatter if name == "reduce_scatter" else per_byte
                hops = (size - 1) * (2 if name == "all_reduce" else 1)
                yield LinkSample(name, "y", size, stride, received, latency + hops * hop + received * each)


def test_link_fit_recovers_the_model():
    link, fits = fit_link(list(link_samples()), "intra")
    assert link.latency_us == pytest.approx(200, rel=1e-6)
    assert link.hop_us == pytest.approx(30, rel=1e-6)
    assert link.bandwidth_gbs == pytest.approx(0.5, rel=1e-6)
    assert link.efficiency["reduce_scatter"] == pytest.approx(dict.fromkeys((2, 4, 8), 2 / 3), rel=1e-6)
    assert all(each.worst_error < 1e-6 for each in fits)


def test_fit_never_gives_negative_costs():
    """Without latency in the samples, and with noise that pulls it below zero."""
    samples = [
        LinkSample(s.collective, s.axis, s.size, s.stride, s.received_bytes, s.seconds * (0.5 if s.size == 2 else 1))
        for s in link_samples(latency=0, hop=0)
    ]
    link, _ = fit_link(samples, "intra")
    assert link.latency_us >= 0 and link.hop_us >= 0 and link.bandwidth_gbs > 0


def test_profile_of_nodes_and_products():
    truth = Hardware("t", 4, Link(1), Link(1), {"float32": 0.5}, gemm_half=40.0, memory_gbs=1e5, launch_us=20.0)
    gemms = [
        GemmSample(m, n, k, float(gemm_seconds(truth, m, n, k, "float32")))
        for m in (32, 128, 512, 2048) for n in (32, 512, 2048) for k in (32, 128, 2048)
    ]  # fmt: skip
    slow = [s for s in link_samples(per_byte=20e-9, scatter=20e-9) if s.size * s.stride > 4]
    fast = [s for s in link_samples() if s.size * s.stride <= 4]
    found, fits = fit(Samples([*fast, *slow], gemms, 1e5), CalibrationJob(4), "mine")
    assert found.intra.bandwidth_gbs == pytest.approx(0.5, rel=1e-3)
    assert found.inter.bandwidth_gbs == pytest.approx(0.05, rel=1e-3)
    assert found.tflops["float32"] == pytest.approx(0.5, rel=0.05)
    assert found.gemm_half == pytest.approx(40, rel=0.15)
    assert {each.what for each in fits} >= {"intra all_gather", "inter all_reduce", "GEMM square"}


def test_measured_on_local_ranks(ndtp, tmp_path):
    path = tmp_path / "mine.toml"
    words = ("--ranks", "2", "--repeats", "1", "--largest", "0.0625", "--output", str(path), "--json", "-")
    code, out, _ = ndtp("bench", "calibrate", *words)
    assert code == 0
    result = json.loads(out)
    assert {sample["collective"] for sample in result["links"]} == set(COLLECTIVES)
    assert {each["what"] for each in result["fits"]} >= {"intra all_gather", "GEMM square"}
    hardware = Hardware.load(path)
    assert (hardware.ranks_per_node, list(hardware.tflops)) == (2, ["float32"])
    assert "[measured.fit]" in path.read_text()
    assert plan(1024, 64, 256, 2, path, dtype="float32")[0].step_ms > 0


@pytest.mark.parametrize(
    "words, message",
    [
        (("--ranks", "1"), "--ranks 2 or more"),
        (("--ranks", "4", "--ranks-per-node", "8"), "take one of [1, 2, 4]"),
        (("--dtype", "int8"), "'int8'; it must be one of fp32, bf16, fp16"),
        (("--output", "/no/such/folder/a.toml"), "the folder /no/such/folder does not exist"),
        (("--repeats", "0"), "'--repeats': 0; it must be an integer from 1 to 1,000,000"),
        (("--ranks", "0"), "'--ranks': 0; it must be an integer from 1"),
        (("--largest", "nan"), "nan; it must be a number from 0.001 to 1024"),
        (("--largest", "1000"), "GiB; fix: a smaller --largest"),
    ],
)
def test_wrong_use(ndtp, words, message):
    code, _, err = ndtp("bench", "calibrate", *words)
    assert code == 2 and message in err


def test_help_has_an_example(ndtp):
    code, out, _ = ndtp("bench", "calibrate", "--help")
    assert code == 0 and "Example: ndtp bench calibrate" in out


def test_products_whose_time_does_not_grow_are_refused_with_a_fix():
    gemms = [GemmSample(n, n, n, 1 / n) for n in (64, 256, 1024)]
    with pytest.raises(GridError, match="dims up to 1024 took no longer than small ones\n  fix:"):
        fit_gemm(Samples([], gemms, 1.0), "float32")
