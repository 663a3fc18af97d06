"""The choice of a configuration: the table, the roof model, tuning.  Pure arithmetic; measurements are injected."""

import json

import pytest
import torch
from ndtp_kernels import products
from ndtp_kernels.choice import roof
from ndtp_kernels.choice import table as config
from ndtp_kernels.choice.chips import CHIPS, chip_named
from ndtp_kernels.choice.problem import TORCH, Config, Problem, bucket
from ndtp_kernels.choice.selection import Options
from ndtp_kernels.choice.table import Table, choose, explain
from ndtp_kernels.tools import tuning
from ndtp_kernels.tools.workloads import KINDS, TRANSPOSES, workload

H200 = CHIPS["h200"]


def test_the_model_meets_the_recorded_measurement():
    """bf16 8192^3 through torch was measured at 769 to 798 TFLOP/s on an H200."""
    cost = roof.estimate(Problem(8192, 8192, 8192), TORCH, H200)
    assert 769 * 0.95 <= cost.tflops <= 798 * 1.05


def test_the_model_knows_that_a_short_k_costs():
    """8192 x 8192 x K: 1.00x of cuBLAS from K = 1024 on, 0.92x at 512; utilization falls as K shrinks."""
    tma = Config("tma", 128, 256, 64, 3, 8)

    def tflops(k):
        return roof.estimate(Problem(8192, 8192, k), tma, H200).tflops

    assert tflops(512) < tflops(1024) < tflops(4096) <= 800


@pytest.mark.parametrize("chip,reach", [("h200", 0.9), ("b200", 0.7)])
def test_no_kernel_is_taken_for_as_good_as_the_library(chip, reach):
    """What Triton reaches without roles and clusters, as published; plain products are the library's on every shape."""
    for size in ((8192, 14336, 4096), (4096, 7168, 2048), (8192, 3584, 2048), (2048, 2048, 512)):
        problem, on = Problem(*size), CHIPS[chip]
        kernels = [c for c in config.candidates(problem, on, config.shipped_table()) if c != TORCH]
        library, *times = (roof.estimate(problem, c, on).seconds for c in (TORCH, *kernels))
        assert reach - 0.15 < library / min(times) < reach + 0.07  # where launches weigh, they are alike
        assert choose(*size, chip=chip) == TORCH


@pytest.mark.parametrize("k", [512, 1024, 2048, 4096, 8192])
def test_the_best_kernel_is_one_that_was_found_to_be_good(k):
    """fp16, 8192 x 8192 x K on Hopper."""
    problem = Problem(8192, 8192, k, "float16")
    kernels = [c for c in config.candidates(problem, H200, config.shipped_table()) if c != TORCH]
    best = min(kernels, key=lambda c: roof.estimate(problem, c, H200).seconds)
    good = [
        (128, 256, 64, 3, 8), (128, 128, 64, 3, 8), (128, 128, 128, 3, 8), (128, 128, 64, 4, 8), (256, 128, 64, 4, 8),
        (128, 128, 64, 5, 4),
    ]  # fmt: skip
    assert (best.block_m, best.block_n, best.block_k, best.num_stages, best.num_warps) in good


def test_the_model_sees_a_lost_wave():
    """133 tiles on 132 SMs take as long as 264."""
    tile = Config("tma", 128, 256, 64, 3, 8)
    grids = ((11, 12), (7, 19), (11, 24))
    one, lost, two = (roof.estimate(Problem(128 * m, 256 * n, 4096), tile, H200).seconds for m, n in grids)
    assert one < lost
    assert lost == pytest.approx(two, rel=0.05)


def test_leaving_processors_free_costs_a_wave():
    tile = Config("tma", 128, 256, 64, 3, 8)
    free = roof.estimate(Problem(128 * 11, 256 * 12, 4096, sms_to_leave=16), tile, H200)
    assert free.seconds > roof.estimate(Problem(128 * 11, 256 * 12, 4096), tile, H200).seconds * 1.5


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("kind", ["plain", "epilogue", "backward", "wgrad"])
def test_every_chip_has_a_kernel_for_every_kind(chip, kind):
    """Even for strides that no descriptor takes, and for the smallest sizes."""
    for size in [(1, 1, 1), (8192, 14336, 4096), (64, 64, 65536)]:
        for tma in (False, True):
            problem = Problem(*size, kind=kind, tma=tma)
            found = config.candidates(problem, chip_named(chip), config.shipped_table())
            assert any(c.kernel != "torch" for c in found)
            assert all(config.fits(problem, c, chip_named(chip)) for c in found)


def test_small_outputs_with_a_long_k_are_split():
    """What 3D sharding creates: fewer tiles than SMs."""
    chosen = choose(256, 256, 32768, chip="h200", torch_passes=3, kind="epilogue")
    assert chosen.split_k > 1


def test_a_fused_epilogue_pays_where_the_product_is_short():
    """torch pays a pass over memory for the activation, which a slower product outweighs where K is long."""
    how = {"kind": "epilogue", "torch_passes": 1, "epilogue_bytes": 2}
    assert choose(4096, 7168, 1024, **how).kernel == "tma" and choose(4096, 7168, 2048, **how).kernel == "tma"
    assert choose(8192, 14336, 8192, **how) == TORCH


def test_exact_fp32_never_takes_a_descriptor_kernel():
    assert choose(4096, 4096, 4096, "float32").kernel in ("torch", "pointer")


@pytest.mark.parametrize("size", [(0, 16, 16), (16, 0, 16), (16, 16, 0)], ids=str)
def test_empty_products_have_a_choice(size):
    assert choose(*size) in config.candidates(Problem(*size), H200, config.shipped_table())


def test_a_tuned_entry_wins_if_it_fits():
    """The table first; but an entry that this product's strides rule out is passed over."""
    wanted = Config("tma", 64, 128, 64, 4, 4, ctas_per_sm=2)
    problem = Problem(2048, 4096, 4096)
    table = config.shipped_table().with_tuned({"h200": {"bfloat16": {problem.shape_class: wanted}}})
    assert choose(2048, 4096, 4096, table=table) == wanted
    assert choose(2047, 4096, 4096, table=table) == wanted  # the same class
    assert choose(2048, 4096, 4096, table=table, tma=False) != wanted
    assert explain(2048, 4096, 4096, table=table)["source"] == "tuned"
    assert explain(2048, 4096, 8192, table=table)["source"] == "roof model"


def test_explain_shows_every_candidate_and_one_choice():
    report = explain(8192, 8192, 8192)
    assert sum(row["chosen"] for row in report["candidates"]) == 1
    assert {"torch"} <= {row["config"] for row in report["candidates"]}
    assert report["candidates"][0]["chosen"]
    json.dumps(report)


def test_tables_round_trip_and_fingerprints_tell_them_apart():
    table = config.shipped_table()
    again = Table.from_json(table.to_json())
    assert again.fingerprint() == table.fingerprint()
    other = table.with_tuned({"h200": {"bfloat16": {"plain nt 1 1 1": TORCH}}})
    assert other.fingerprint() != table.fingerprint()
    assert Config.from_code(TORCH.code) == TORCH
    special = Config("tma", 128, 256, 64, 4, 8, 4, 2, 2, True, 2)
    assert Config.from_code(special.code) == special


def test_buckets_keep_two_significant_bits():
    assert [bucket(x) for x in (0, 1, 7, 8, 9, 4096, 4097, 14336, 28672)] == [0, 1, 7, 8, 10, 4096, 5120, 14336, 28672]


def test_unknown_chips_are_named():
    with pytest.raises(ValueError, match="fix: one of a100"):
        choose(1, 1, 1, chip="h300")


def test_tuning_writes_the_winner_to_the_users_cache(tmp_path):
    """With a measurement in which the slowest candidate by the model wins."""
    path = tmp_path / "gemm.json"
    asked = []

    def measure(work, configs):
        asked.append(list(configs))
        times = {c: 1e-3 + i * 1e-6 for i, c in enumerate(reversed(configs))}
        times[configs[0]] = None  # this one gave wrong numbers
        return times

    done = tuning.tune(
        [(64, 128, 256)], kinds=("plain", "epilogue"), layouts=("nt",), path=path, chip=H200,
        device=torch.device("cpu"), measure=measure,
    )  # fmt: skip
    assert TORCH in asked[0] and TORCH in asked[1]
    stored = Table.from_json(path.read_text())
    entry = stored.tuned["h200"]["bfloat16"][Problem(64, 128, 256).shape_class]
    assert entry == asked[0][-1]
    table = config.shipped_table().with_tuned(stored.tuned)
    assert choose(64, 128, 256, table=table) == entry
    assert done["fingerprint"] == table.fingerprint()
    tuning.tune(
        [(32, 32, 512)], kinds=("plain",), layouts=("nt",), path=path, chip=H200, device=torch.device("cpu"),
        measure=measure,
    )  # fmt: skip
    assert len(Table.from_json(path.read_text()).tuned["h200"]["bfloat16"]) == 3


def test_tuning_takes_only_kernels_that_run_as_such(caplog):
    """On a CPU torch stands in for every kernel: its time would be filed under their names."""
    work = workload("plain", 24, 32, 40, dtype=torch.bfloat16, device=torch.device("cpu"))
    kernel = Config("pointer", 64, 64, 64)
    assert tuning.right_ones(work, [TORCH, kernel]) == [TORCH]
    assert f"{kernel} is no candidate here" in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_workloads_agree_with_torch(kind):
    """What is timed computes the same thing on both sides; and a wrong result would be seen."""

    work = workload(kind, 24, 32, 40, dtype=torch.bfloat16, device=torch.device("cpu"))
    work.reset()
    assert work.error(work.ours(Options())) < tuning.tolerance("bfloat16")
    work.reset()
    got = work.eager()
    got = got[0] if isinstance(got, tuple) else got
    assert work.error(got) < tuning.tolerance("bfloat16")
    assert work.error(got * 1.1) > tuning.tolerance("bfloat16")


@pytest.mark.parametrize("kind,layout", [("plain", x) for x in TRANSPOSES] + [(kind, "nt") for kind in KINDS[1:]])
def test_workloads_describe_the_problem_that_the_choice_sees(kind, layout, monkeypatch):
    """Else tuning would file its winners under shape classes that no product looks up."""
    seen = []
    monkeypatch.setattr(products, "triton_chip", lambda *_: None if kind.startswith("scatter") else H200)
    monkeypatch.setattr(products, "configuration", lambda op, problem, *_: seen.append(problem) or TORCH)
    work = workload(kind, 48, 64, 80, dtype=torch.bfloat16, device=torch.device("cpu"), layout=layout)
    work.ours(Options())
    assert seen == ([] if kind.startswith("scatter") else [work.problem])
