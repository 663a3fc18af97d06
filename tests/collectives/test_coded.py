"""Few bytes on the wire: the numbers that arrive, the same on all ranks and in any chunks, and every byte counted."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import ndtp
from ndtp import CommMeter, Grid, ProcessGrid, Wire
from ndtp.collectives.codecs import CODECS

# The largest error of a number, as a part of the largest of its row: half of the last place that a dtype keeps.
ERRORS = {"bf16": 2**-8, "fp16": 2**-11, "fp8_e4m3": 2**-4, "fp8_e5m2": 2**-3, "int8": 1 / 254}
RANGE = {"fp16": 6e4}  # where a dtype without scales has less than fp32
ODD = (0.0, -0.0, math.nan, math.inf, -math.inf, 1e-45, 1e-38, 3.4e38, -3.4e38, 448.0, 449.0, 1e-7)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@settings(max_examples=150, deadline=None)
@given(
    name=st.sampled_from(list(CODECS)),
    dtype=st.sampled_from(DTYPES),
    lead=st.lists(st.integers(0, 5), max_size=2),
    width=st.integers(0, 40),
    odd=st.lists(st.tuples(st.integers(0, 10**6), st.sampled_from(ODD)), max_size=3),
    magnitude=st.sampled_from([1e-40, 1e-20, 1.0, 1e4, 1e37]),
    seed=st.integers(0, 100),
)
def test_what_arrives_is_near_to_what_was_sent(name, dtype, lead, width, odd, magnitude, seed):
    """Any shapes, and any numbers: what is finite arrives near, what is not shows, and rows do not touch each other."""
    codec, shape = CODECS[name], (*lead, width)
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * magnitude).to(dtype)
    for at, value in odd if x.numel() else ():
        x.view(-1)[at % x.numel()] = value
    start = codec.dtype.itemsize  # behind a number of another part: an odd address for what has a byte each
    memory = torch.full((start + codec.num_bytes(shape),), 7, dtype=torch.uint8)[start:]
    codec.encode(x, memory)
    found = codec.decode(memory, shape, dtype)
    assert found.dtype == dtype and found.shape == x.shape
    if lead and len(lead) == 1:
        rows = codec.encode_rows(x)
        assert rows.shape == (x.shape[0], codec.num_bytes((1, width)))
        assert torch.equal(codec.decode_rows(rows, width, dtype).nan_to_num(7.0), found.nan_to_num(7.0)), "row by row"
    if not x.numel():
        return
    wide, largest = x.double(), x.double().abs().amax(-1, keepdim=True)
    finite = (wide.isfinite() if codec.largest is None else largest.isfinite().expand_as(wide)) & (
        wide.abs() < RANGE.get(name, 3e38)
    )
    assert not found[~wide.isfinite()].isfinite().any(), "what is not finite shows"
    largest = largest if codec.largest is not None else wide.abs().nan_to_num(0.0, posinf=0.0).amax(-1, keepdim=True)
    tiny = 1.2e-38 if name != "fp16" else 6e-8  # what no format tells from zero
    allowed = ERRORS[name] * 1.01 * largest + tiny + torch.finfo(dtype).eps * largest + torch.finfo(dtype).tiny
    near = (found.double() - wide).abs() <= allowed
    over = (found.double().abs() > torch.finfo(dtype).max) & (wide.abs() > 0.9 * torch.finfo(dtype).max)
    assert (near | over | ~finite).all(), "what is finite is near"
    assert (found[(wide == 0) & finite] == 0).all(), "zeros stay"


WIRES = ("bf16", "fp8", "int8", {"weights": "fp8", "gradients": "bf16"})
RECIPES = ("recipe=bf16", "recipe=fp8-rowwise")
# Of norms: what the roundings of a block of two products come to.
TOLERANCES = {"bf16": 2e-2, "recipe=bf16": 2e-2, "fp8": 0.15, "int8": 6e-2, "mixed": 0.15}


def blocks(sizes, scheme, movers, wires):
    """Outputs and gradients of every wire against those of none: near, alike in chunks, the same bits by any mover."""
    mesh_of = {mover: ProcessGrid(Grid(sizes), collectives=mover, timeout=60) for mover in movers}
    found, dense = {}, nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48))
    for wire in (None, *wires):
        results = {}
        for chunks in (1, 2):
            for mover in movers if chunks == 1 else movers[:1]:
                mesh, options = mesh_of[mover], {"scheme": scheme, "chunks": chunks, "wire": wire}
                block = ndtp.nn.MLP.from_dense(dense[0], dense[2], "gelu", mesh=mesh, **options)
                x = torch.randn(32, 48, generator=torch.Generator().manual_seed(1))
                mine = block.in_layout.shard(x, mesh.rank).requires_grad_()
                with CommMeter() as meter:
                    y = block(mine)
                    (y * torch.linspace(1, 2, y.shape[-1])).sum().backward()
                    grads = [p.grad.to_local().clone() for p in block.parameters()]
                assert meter.volume == block.volume(32), f"{wire}: the bytes that were told"
                assert block(mine.detach()[:0]).shape == (0, y.shape[-1]), f"{wire}: a batch without rows"
                results[chunks, mover] = ([y.detach(), mine.grad, *grads], meter.volume.total)
        assert len({moved for _, moved in results.values()}) == 1, f"{wire}: as many bytes in any chunks"
        (first, moved), *of_others = (results[1, mover] for mover in movers)
        for other, _ in of_others:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True)), f"{wire}: other bits"
        if wire in RECIPES:  # numbers of so few bits are summed up without an error in fp32
            assert all(map(torch.equal, results[2, movers[0]][0], first)), f"{wire}: other bits in chunks"
        # Other products of other numbers of rows may round otherwise before anything travels.
        assert all((a - b).norm() < 1e-2 * b.norm() for a, b in zip(results[2, movers[0]][0], first, strict=True)), wire
        found[str(wire)] = first, moved
    plain, moved = found.pop("None")
    for wire, (mine, bytes_of_it) in found.items():
        allowed = TOLERANCES.get(wire, TOLERANCES["mixed"])
        for a, b in zip(mine, plain, strict=True):
            error = float((a - b).norm() / b.norm().clamp(min=1e-6))
            assert error < allowed, f"{wire}: off by {error:.3f}"
        share = bytes_of_it / moved
        least = {"bf16": 0.5, "recipe=bf16": 0.5, "fp8": 0.4, "int8": 0.4}.get(wire, 0.8)
        assert share == least if least == 0.5 else share < least, f"{wire} moves {share:.2f} of the bytes"


@pytest.mark.parametrize(
    ("sizes", "scheme", "movers", "wires"),
    [
        ({"x": 2, "y": 2}, "2d", ("torch", "symmetric"), WIRES[1:2]),
        ({"z": 2, "y": 2}, "3d", ("torch",), (*WIRES, *RECIPES)),
        ({"dp": 2, "x": 2}, "1d-sp", ("torch",), WIRES[2:3]),
    ],
)
def test_blocks(ranks, sizes, scheme, movers, wires):
    ranks(4).run(blocks, sizes, scheme, movers, wires)


def loss_of(y):
    return (y.float() * torch.linspace(1, 2, y.shape[-1])).sum()


def step_of(module, x):
    """Output, and the gradients of a step as they are stored."""
    module.zero_grad()
    y = module(x)
    loss_of(y).backward()
    return [y.detach(), *gradients_of(module)]


def gradients_of(module):
    return [p.grad.to_local().clone() for p in module.parameters()]


def far(mine, plain):
    pairs = zip(mine, plain, strict=True)
    return max(float((a - b).float().norm() / b.float().norm().clamp(min=1e-6)) for a, b in pairs)


def block_of(mesh, wire, dtype=torch.float32):
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    made = ndtp.nn.MLP(32, 64, mesh=mesh, seed=0, dtype=dtype, wire=wire)
    return made, made.in_layout.shard(x, mesh.rank).to(dtype)


def uses(sizes):
    """The ways in which blocks are used, on two ranks that share weights, or activations."""
    mesh = ProcessGrid(Grid({"z": 1, "x": 1, "y": 1, **sizes}), timeout=60)
    plain = step_of(*block_of(mesh, None))
    assert all(map(torch.equal, plain, step_of(*block_of(mesh, Wire())))), "a wire that says nothing changes no bit"
    few, mine = block_of(mesh, "fp8")
    assert mesh.sending(None) is mesh and few.mesh is mesh.sending("fp8") is few.up.mesh
    assert few.mesh.sending(few.mesh.wire) is few.mesh and few.mesh.sending(Wire()).wire == Wire()
    once = step_of(few, mine)
    assert 0 < far(once, plain) < 0.15
    assert all(map(torch.equal, once, step_of(few, mine))), "gathers that start ahead have the same bits"
    fed = block_of(mesh, {"weight_gradients": "fp8", "error_feedback": True})[0]
    each = [step_of(fed, mine)[1:] for _ in range(8)]
    once_fed, sums = far(each[0], plain[1:]), [sum(grads) / 8 for grads in zip(*each, strict=True)]
    assert far(sums, plain[1:]) < once_fed / 4 if "z" in sizes else once_fed < 1e-6, "what is kept back comes later"
    few.zero_grad()
    with mesh.accumulate():
        loss_of(few(mine)).backward()
    loss_of(few(mine)).backward()
    assert far([each / 2 for each in gradients_of(few)], once[1:]) < 0.1
    few.zero_grad()
    mesh.interleave(lambda part: loss_of(few(part)).backward(), mine.chunk(2))
    assert far(gradients_of(few), once[1:]) < 0.1
    for dtype in (torch.bfloat16, torch.float16):
        narrow, rows = block_of(mesh, "fp8", dtype)
        assert far(step_of(narrow, rows), plain) < 0.2
        assert narrow.volume(16).total < 0.75 * block_of(mesh, None, dtype)[0].volume(16).total
    with torch.autocast("cpu", torch.bfloat16):
        assert far(step_of(few, mine), plain) < 0.2
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0**30), torch.optim.SGD(few.parameters(), lr=1.0)
    before = [p.detach().to_local().clone() for p in few.parameters()]
    few.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = loss_of(few(mine))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() < 2.0**30, "what overflowed was seen"
    loss_of(fed(mine * math.inf)).backward()
    assert all(x.isfinite().all() for x in step_of(fed, mine)), "what is not finite is fed to no other step"
    assert all(map(torch.equal, before, [p.detach().to_local() for p in few.parameters()])), "a step is skipped"
    rows = mine.clone()
    rows[0, 0] = math.nan
    assert not few(rows).isfinite().all()


@pytest.mark.parametrize("sizes", [{"z": 2}, {"y": 2}], ids=str)
def test_uses(ranks, sizes):
    ranks(2).run(uses, sizes)


def modules():
    """Modules tell their bytes with a wire, whatever moves in them."""
    mesh = ProcessGrid(Grid(e=2, y=1, x=1, z=1), timeout=60)
    made = ndtp.nn.MoE(16, 32, 4, 2, mesh=mesh, wire="fp8", seed=0)
    x = made.in_layout.shard(torch.randn(12, 16, generator=torch.Generator().manual_seed(0)), mesh.rank)
    with CommMeter() as meter:
        made(x.requires_grad_()).square().sum().backward()
    told = made.volume(12, routing=made.counts())
    assert meter.volume.by("collective")["all_to_all"] == told.by("collective")["all_to_all"], (meter.volume, told)
    mesh = ProcessGrid(Grid(z=1, x=1, y=2), timeout=60)
    attention = ndtp.nn.Attention(16, 4, 1, mesh=mesh, wire="int8", seed=0)
    x = attention.in_layout.shard(torch.randn(16, 16, generator=torch.Generator().manual_seed(0)), mesh.rank)
    with CommMeter() as meter:
        attention(x.requires_grad_(), 8).square().sum().backward()
    assert meter.volume == attention.volume(2, 8)
    table = ndtp.nn.Embedding(32, 16, mesh=mesh, wire="fp8", seed=0)
    with CommMeter() as meter:
        table(table.in_layout.shard(torch.arange(16), mesh.rank)).square().sum().backward()
    assert meter.volume == table.volume(16)
    pair = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    model = ndtp.parallelize(pair, mesh, wire="fp8", plan={"0": "up", "2": "down"})
    with CommMeter() as meter:
        model(torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()).square().sum().backward()
    assert meter.volume == model.ndtp_report.volume(8)


def test_modules_tell_their_bytes(ranks):
    ranks(2).run(modules)


def whole_model():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    mesh = ProcessGrid(Grid(dp=2, z=1, y=2, x=1), timeout=60)
    losses, shares, volumes = {}, {}, {}
    for wire, recipe in ((None, None), ("bf16", "bf16"), ("fp8", None), ("fp8-rowwise", "fp8-rowwise")):
        torch.manual_seed(0)
        model = MixtralForCausalLM(MixtralConfig(num_hidden_layers=1, vocab_size=64, num_local_experts=2, **sizes))
        given = {"wire": wire} if recipe is None else {"recipe": recipe}
        ndtp.parallelize(model, mesh, scheme="3d", chunks=1, **given)
        ids = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(0))
        with CommMeter() as meter:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            for parameter in model.parameters():
                parameter.grad.to_local()  # ends what is still on its way
        losses[wire] = float(loss.detach())
        volumes[wire] = (meter.volume.total, model.ndtp_report.volume(4, 8).total)
        shares[wire] = meter.volume.total
    assert abs(losses["bf16"] - losses[None]) < 1e-2
    assert all(0 < abs(losses[wire] - losses[None]) < 5e-2 for wire in ("fp8", "fp8-rowwise"))
    assert all(measured == said for measured, said in volumes.values()), volumes
    assert shares["bf16"] < 0.55 * shares[None] and shares["fp8"] < 0.4 * shares[None], shares


def test_a_whole_model_moves_what_its_report_says(ranks):
    pytest.importorskip("transformers")
    ranks(4).run(whole_model)
