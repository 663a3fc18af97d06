"""The kernels in Gluon: their numbers, and that no order of events deadlocks them or lets an operand be overwritten.

No device: see `emulated`.  What the compiler makes of them is in test_aot.py.
"""

import itertools
import random
from dataclasses import replace

import pytest
import torch
from emulated import Machine, kind_of, launch
from explored import explore
from ndtp_kernels import reference
from ndtp_kernels.call import GemmCall
from ndtp_kernels.choice.chips import CHIPS
from ndtp_kernels.choice.problem import Config, Problem
from ndtp_kernels.choice.table import candidates, choose_for, fits, shipped_table
from ndtp_kernels.launch import gemm_launches, share_out
from ndtp_kernels.operands import matrix
from ndtp_kernels.triton_code import blackwell, hopper

BLOCKS = {"BLOCK_M": 4, "BLOCK_N": 4, "BLOCK_K": 2, "GROUP_M": 2, "SUBTILE": 2}


def integers(*shape):
    return torch.randint(-3, 4, shape).float()


def product(
    module,
    size,
    choose,
    *,
    stages=3,
    residents=2,
    kept=None,
    grid=None,
    transposes=(False, True),
    act="none",
    extras=False,
    **how,
):
    """Run a kernel and compare it with the reference; returns the traces."""
    m, n, k = size
    torch.manual_seed(0)
    a = integers(k, m) if transposes[0] else integers(m, k)
    b = integers(n, k) if transposes[1] else integers(k, n)
    c, pre, bias = torch.full((m, n), torch.nan), torch.full((m, n), torch.nan), integers(n)
    blocks = dict(BLOCKS)
    blocks["BLOCK_M"] *= how.get("programs", 1)
    tiles = -(-m // blocks["BLOCK_M"]) * -(-n // blocks["BLOCK_N"])
    kept = tiles if kept is None else kept
    traces = launch(
        module,
        {
            "A": a,
            "B": b,
            "C": c,
            "pre": pre if extras else None,
            "bias": bias if extras else None,
        },
        residents + tiles - kept if grid is None else grid,
        choose,
        M=m,
        N=n,
        K=k,
        sa=a.stride(0),
        sb=b.stride(0),
        sc=n,
        residents=residents,
        kept=kept,
        STAGES=stages,
        A_ROW_MAJOR=not transposes[0],
        B_ROW_MAJOR=not transposes[1],
        ACT=act,
        **blocks,
        **how,
    )
    want, before = reference.gemm(
        a,
        b,
        bias if extras else None,
        transpose_a=transposes[0],
        transpose_b=transposes[1],
        activation_name=act,
    )
    if act == "none":
        assert torch.equal(c.double(), want.double())
    else:
        assert (c - want).abs().max() < 1e-5 * (1 + want.abs().max())
    if extras:
        assert torch.equal(pre.double(), before.double())
    return traces


def drawn(seed):
    return random.Random(seed).choice


def preferring(order):
    """Always the first that can go on: starves the others for as long as that is possible."""
    rank = {name: at for at, name in enumerate(order)}
    return lambda able: min(able, key=lambda each: rank.get(kind_of(each), len(rank)))


FORMS = [(hopper, {"num_warps": 4}), (hopper, {"num_warps": 8}), (blackwell, {})]
IDS = ["two groups", "one group", "sm_100"]


@pytest.mark.parametrize("module,how", FORMS, ids=IDS)
@pytest.mark.parametrize("transposes", list(itertools.product((False, True), repeat=2)), ids=str)
def test_numbers(module, how, transposes):
    """Ragged in all three letters, bias, pre-activation; programs that stay and programs of one tile."""
    product(module, (10, 9, 7), drawn(1), kept=6, transposes=transposes, extras=True, act="relu", **how)
    product(module, (10, 9, 7), drawn(2), transposes=transposes, act="gelu", **how)


@pytest.mark.parametrize("module,how", FORMS, ids=IDS)
@pytest.mark.parametrize("size", [(1, 1, 1), (4, 4, 2), (12, 4, 3), (9, 17, 12)], ids=str)
def test_sizes(module, how, size):
    """One step of K, fewer tiles than groups, more steps than stages."""
    for seed in range(2):
        product(module, size, drawn(seed), residents=1, **how)


@pytest.mark.parametrize("module,how", FORMS, ids=IDS)
def test_schedules_that_starve(module, how):
    names = ("load_tiles", "multiply_tiles", "store_tiles" if module is blackwell else "hopper", "copy")
    turns = [names[i:] + names[:i] for i in range(len(names))]  # each is the first, and the last, that can go on
    for order in (*turns, *(turn[::-1] for turn in turns)):
        product(module, (8, 8, 5), preferring(order), residents=1, stages=2, **how)


@pytest.mark.parametrize("module,how", FORMS, ids=IDS)
@pytest.mark.parametrize("stages", [2, 3])
def test_every_order_of_events(module, how, stages):
    """Three tiles of two steps, copies landing at any time: no deadlock, nothing overwritten, the same data read."""
    traces = product(module, (12, 4, 4), drawn(3), residents=1, stages=stages, **how)
    for events, counts in traces.values():
        assert explore(events, counts) > 100


def test_one_stage_is_too_few():
    """The group keeps one product in flight, and so the one stage that the next one needs."""
    with pytest.raises(AssertionError, match="nothing can go on"):
        product(hopper, (12, 4, 4), drawn(3), stages=1)
    assert not fits(Problem(4096, 4096, 4096), Config("gluon", 128, 128, 64, 1, 4), CHIPS["h200"])


def test_without_turns_the_second_group_reads_too_early(monkeypatch):
    """A barrier that is a round behind has the parity of one that is done."""
    waits = Machine.wait

    def unless_turn(self, handle, parity):
        if not handle.own.name.startswith("0:6."):
            waits(self, handle, parity)

    monkeypatch.setattr(Machine, "wait", unless_turn)
    with pytest.raises(AssertionError, match="was written while a product read it"):
        product(hopper, (12, 4, 9), drawn(0), residents=1, stages=2)


def in_a_cluster(seed, remote, size=(16, 9, 7), **how):
    return product(hopper, size, drawn(seed), programs=2, residents=1, remote=remote, **how)


@pytest.mark.parametrize("num_warps", [4, 8])
def test_a_cluster_of_two(num_warps):
    """One load of B for both programs, if an arrival at the barrier of both reaches the first one."""
    for transposes in itertools.product((False, True), repeat=2):
        in_a_cluster(1, True, transposes=transposes, num_warps=num_warps, extras=True)
    traces = in_a_cluster(2, True, (16, 4, 4), num_warps=num_warps, stages=2)
    for events, counts in traces.values():
        assert explore(events, counts) > 100


def test_arrivals_that_stay_with_their_program_let_the_other_ones_operand_be_overwritten():
    """As Triton 3.7.1 compiles them: why no configuration has a cluster yet."""
    with pytest.raises(AssertionError, match="was written while a product read it"):
        for seed in range(100):
            in_a_cluster(seed, False, num_warps=8, stages=2)


def test_only_a_measurement_chooses_them():
    problem = Problem(8192, 14336, 4096)
    table = shipped_table()
    for chip in ("h200", "b200"):
        own = [each for each in candidates(problem, CHIPS[chip], table, unmeasured=True) if each.kernel == "gluon"]
        assert own and not set(own) & set(candidates(problem, CHIPS[chip], table))
        for config in own:
            assert fits(problem, config, CHIPS[chip])
            for change in (
                {"dtype": "float32"},
                {"batch": 2},
                {"tma_out": False},
                {"out_bytes": 4},
                {"kind": "backward"},
            ):
                assert not fits(replace(problem, **change), config, CHIPS[chip]), change
            tuned = table.with_tuned({chip: {"bfloat16": {problem.shape_class: config}}})
            assert choose_for(problem, CHIPS[chip], tuned) == config


def test_what_is_launched():
    """Grid and arguments of a product on an H200, and of one that leaves SMs to a collective."""
    config = Config("gluon", 128, 128, 64, 6, 4, subtile=2)
    a, b, c = (
        torch.empty(size, device="meta", dtype=torch.bfloat16) for size in ((512, 4096), (8192, 512), (4096, 8192))
    )
    views = (
        matrix(a, "mk", True, None, op="t", name="a"), matrix(b, "kn", True, None, op="t", name="b"),
        matrix(c, "mn", False, None, op="t", name="c"),
    )  # fmt: skip
    for leave, grid in ((0, 132), (16, share_out(2048, config, CHIPS["h200"], 16).grid)):
        (found,) = gemm_launches(GemmCall(a, b, c, *views, sms_to_leave=leave), config, CHIPS["h200"])
        assert found.grid == grid and found.kernel is hopper.hopper_kernel
        assert [found.arguments[name] for name in ("M", "N", "K", "sa", "sb", "sc")] == [
            4096,
            8192,
            512,
            4096,
            512,
            8192,
        ]
        assert not found.constants["A_ROW_MAJOR"] and not found.constants["B_ROW_MAJOR"]
