"""Grids for decoding: bytes against those of a plan, what bounds a step, and who wins where."""

from dataclasses import replace

import pytest

from ndtp import GridError
from ndtp.planner.decode import DecodeQuestion, choose_decode, weigh_decode, winners
from ndtp.planner.hardware import Hardware
from ndtp.planner.training.transformer import Transformer

H100 = Hardware.load("h100-ib")
SMALL = Transformer(32, 4096, 14336, 32, 128256, 4096, kv_heads=8, gated=True)
LARGE = Transformer(126, 16384, 53248, 128, 128256, 4096, kv_heads=8, gated=True)
SIZES = {"dp": 1, "z": 1, "x": 1, "y": 1}


def test_one_rank_reads_weights_and_cache_once():
    one = weigh_decode(DecodeQuestion(SMALL, 16, 1, H100), "1d", SIZES)
    assert one.moved == one.latency == 0
    assert one.weights == pytest.approx(8.03e9 * 2, rel=0.001)
    assert one.keys == 32 * 16 * 4096 * 2 * 8 * 128 * 2
    rate = H100.memory_gbs * 1e9
    launches = (2 * 2 * 32 + 1) * H100.launch_us * 1e-6
    read = (one.weights - 128256 * 4096 * 2) / rate  # the embedding is looked up
    assert one.products == pytest.approx(read + launches, rel=0.02)
    assert one.cache == pytest.approx(one.keys / rate)


def test_1d_moves_whole_hidden_states_and_2d_a_part():
    """Pope et al. 2022, section 3.2: what moves of a layer is the same on any ranks, or shrinks with their root."""
    moved, machine = {}, replace(H100, ranks_per_node=1)  # where all links are alike
    for ranks in (16, 64):
        question = DecodeQuestion(LARGE, 512, ranks, machine)
        line = weigh_decode(question, "1d", SIZES | {"y": ranks})
        root = {16: 4, 64: 8}[ranks]
        square = weigh_decode(question, "2d-features", SIZES | {"x": root, "y": root})
        assert line.weights == square.weights and line.products == pytest.approx(square.products, rel=0.1)
        moved[ranks] = line.moved, square.moved
    assert moved[64][0] == pytest.approx(moved[16][0], rel=0.1)
    assert moved[64][1] < 0.65 * moved[16][1] and moved[64][1] < 0.65 * moved[64][0]


def test_the_first_is_the_fastest_that_fits():
    question = DecodeQuestion(LARGE, 8, 16, H100)
    choices = choose_decode(question)
    assert choices[0].scheme == "1d" and choices[0].seconds == min(each.seconds for each in choices)
    assert all(each.memory <= question.room for each in choices)
    won = winners(DecodeQuestion(LARGE, 8, 64, H100), (8, 128, 1024))
    assert won[0][2].scheme == "1d" and len(won) > 1, "latency first, then bytes"
    assert all(first <= last for first, last, _ in won)
    with pytest.raises(GridError, match="the least that any way needs is"):
        choose_decode(DecodeQuestion(LARGE, 8, 4, H100))
    with pytest.raises(GridError, match="fix: ranks that divide the heads"):
        choose_decode(DecodeQuestion(SMALL, 1, 7, H100))
    assert choose_decode(DecodeQuestion(LARGE, 8, 16, H100, fixed={"x": 4}))[0].sizes["x"] == 4
