"""SMs that are left to collectives: by the programs of every product, and in the simulation of bench/sm_sharing.py."""

import sys
from pathlib import Path

import pytest
import torch
from ndtp_kernels.call import GemmCall
from ndtp_kernels.choice.chips import CHIPS
from ndtp_kernels.choice.problem import TORCH, Config, Problem
from ndtp_kernels.choice.table import choose, shipped_table
from ndtp_kernels.launch import gemm_launches, share_out
from ndtp_kernels.operands import matrix

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import gemm as bench
import sm_sharing

H200 = CHIPS["h200"]
SHAPES = [shape for _, shape in bench.products(quick=False)]
STAYING = Config("tma", 128, 256, 64, 3, 8)


def launch(m, n, k, config, leave):
    a, b, c = (torch.empty(size, device="meta", dtype=torch.bfloat16) for size in ((m, k), (n, k), (m, n)))
    call = GemmCall(
        a, b, c, matrix(a, "mk", False, None, op="t", name="a"), matrix(b, "kn", True, None, op="t", name="b"),
        matrix(c, "mn", False, None, op="t", name="c"), sms_to_leave=leave,
    )  # fmt: skip
    assert call.problem().sms_to_leave == leave
    found, *_ = gemm_launches(call, config, H200)
    return found


def test_sixteen_sms_are_left_by_every_product_of_the_benchmark():
    """A kernel of ours, no more than 116 programs of which stay; each of the others holds its SM for one tile."""
    assert len(SHAPES) == 72
    staying = 0
    for m, n, k in SHAPES:
        assert choose(m, n, k) == TORCH, "else the check below would show less than it says"
        config = choose(m, n, k, sms_to_leave=16)
        assert config.kernel != "torch"
        found = launch(m, n, k, config, 16)
        residents, kept = found.arguments["residents"], found.arguments["kept"]
        tiles = -(-m // config.block_m) * -(-n // config.block_n) * config.split_k
        assert residents in (0, H200.num_sms - 16)
        assert kept % max(residents, 1) == 0 and found.grid - residents == tiles - kept  # each tile once
        staying += residents > 0
    assert staying > 36, "most products have tiles enough for programs that stay"


def test_without_collectives_every_sm_keeps_its_program():
    for m, n, k in SHAPES:
        found = launch(m, n, k, STAYING, 0)
        tiles = -(-m // 128) * -(-n // 256)
        assert found.grid == found.arguments["residents"] == min(tiles, 132) and found.arguments["kept"] == tiles


def test_shares():
    """By hand: 27 tiles an SM, of which 25 are kept; few tiles, programs that share an SM, or no SM left: one each."""
    assert share_out(3584, STAYING, H200, 16) == (116 + 684, 116, 2900)
    assert share_out(264, STAYING, H200, 16) == (264, 0, 0)
    assert share_out(3584, Config("tma", 64, 128, 64, 4, 4, ctas_per_sm=2), H200, 16) == (3584, 0, 0)
    assert share_out(3584, STAYING, H200, 132) == (3584, 0, 0)
    pointer = Config("pointer", 64, 64, 64, 3, 4)  # several on an SM, and none stays: nothing is to be capped
    assert share_out(3584, pointer, H200, 16) == share_out(3584, pointer, H200, 0) == (3584, 0, 0)


def test_a_tuned_torch_does_not_win_where_sms_are_to_be_left():
    problem = Problem(8192, 8192, 8192)
    table = shipped_table().with_tuned({"h200": {"bfloat16": {problem.shape_class: TORCH}}})
    assert choose(8192, 8192, 8192, table=table) == TORCH
    assert choose(8192, 8192, 8192, table=table, sms_to_leave=16).kernel == "tma"


@pytest.fixture(scope="module")
def simulated():
    return sm_sharing.compare((8192, 14336, 4096), H200, ctas=16, share=0.5)


def test_the_simulation_gives_what_is_known_of_static_programs(simulated):
    """132 static programs wait for the collective and then do all their tiles; 116 lose its SMs for good."""
    found = {way: round(row["gemm"], 2) for way, row in simulated.items()}
    assert found["static, all SMs"] == 1.46
    assert found["static, some left"] == 1.11
    assert found["counter"] == 1.04


def test_the_default_is_within_six_percent_of_the_gemm_alone(simulated):
    assert simulated["default"]["gemm"] <= 1.06
    assert simulated["default"]["without_collective"] <= 1.01


@pytest.mark.parametrize("ready", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("share", [0.1, 0.5, 1.5])
def test_the_default_is_never_far_from_what_must_be(ready, share):
    """The collective's SMs are gone for its time: no order of tiles does better than to lose just that."""
    row = sm_sharing.compare((8192, 14336, 4096), H200, ctas=16, share=share, ready=ready)["default"]
    lost = 16 * min(share, row["gemm"] - ready) / 132
    assert row["gemm"] <= (1 + lost) * 1.03
    assert row["collective_waits"] < 0.04, "at most for the tile that an SM has begun"


def test_a_collective_is_starved_by_programs_that_stay():
    """What `sms_to_leave` is for: issued later, it waits for the end of the GEMM."""
    found = sm_sharing.compare((8192, 14336, 4096), H200, ctas=16, share=0.5, ready=0.3)
    assert found["static, all SMs"]["collective_waits"] > 0.6 and found["counter"]["collective_waits"] > 0.6


def test_by_hand():
    """Two SMs, three tiles of 1 s without a start, a collective on one SM for 2 s: the other SM does them all."""
    three = sm_sharing.Gemm([1, 1, 1], 1.0, 0.0)
    assert sm_sharing.simulate(three, 2) == (2.0, 0.0)
    assert sm_sharing.simulate(three, 2, sm_sharing.Collective(1, 2.0)) == (3.0, 2.0)
    assert sm_sharing.simulate(three, 2, sm_sharing.Collective(2, 2.0, ready=0.5)) == (4.0, 3.0)
