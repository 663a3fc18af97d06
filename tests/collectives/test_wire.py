"""Few bytes on the wire: the numbers that arrive, the same on all ranks and in any chunks, and every byte counted."""

import math

import pytest
import torch
from torch import nn

import ndtp
from ndtp import CommMeter, Grid, GridError, ProcessGrid, Wire
from ndtp.collectives.codecs import CODECS

# The largest error of a number, as a part of the largest of its row: half of the last place that a dtype keeps.
ERRORS = {"bf16": 2**-8, "fp16": 2**-11, "fp8_e4m3": 2**-4, "fp8_e5m2": 2**-3, "int8": 1 / 254}


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("shape", [(7, 33), (2, 3, 5), (9,), (4, 0)])
def test_what_arrives_is_near_to_what_was_sent(name, shape):
    codec, x = CODECS[name], torch.randn(shape, generator=torch.Generator().manual_seed(0))
    wire = torch.empty(codec.num_bytes(shape), dtype=torch.uint8)
    codec.encode(x, wire)
    found = codec.decode(wire, shape, torch.float32)
    allowed = ERRORS[name] * 1.001 * (x.abs().amax(-1, keepdim=True) if x.numel() else x)
    assert ((found - x).abs() <= allowed).all()
    again = torch.empty_like(wire)
    codec.encode(found, again)
    assert codec.decode(again, shape, torch.float32).sub(found).abs().le(allowed * 1e-2).all(), "it may travel on"


@pytest.mark.parametrize("name", CODECS)
def test_what_is_not_finite_is_not_hidden_and_zeros_stay(name):
    codec, x = CODECS[name], torch.ones(4, 8)
    x[0], x[1, 3], x[2, 3] = 0.0, math.nan, math.inf
    wire = torch.empty(codec.num_bytes((4, 8)), dtype=torch.uint8)
    codec.encode(x, wire)
    found = codec.decode(wire, (4, 8), torch.float32)
    assert (found[0] == 0).all() and (found[3] == 1).all()
    assert not found[1, 3].isfinite() and not found[2, 3].isfinite()


@pytest.mark.parametrize(
    ("wire", "said"),
    [("fp4", "'fp4', which is none of"), (8, "neither a dtype nor a dict"), ({"weight": "bf16"}, "names 'weight'")],
)
def test_a_wire_that_is_none_is_refused_with_the_fix(wire, said):
    with pytest.raises(GridError, match=said) as caught:
        ProcessGrid(Grid(x=1), wire=wire)
    assert "fix: wire='bf16'" in str(caught.value)


def test_names_of_kinds():
    assert Wire.of("fp8") == Wire("fp8_e4m3", "fp8_e4m3", "fp8_e5m2", "fp8_e5m2")
    assert Wire.of({"gradients": "bf16"}) == Wire(None, None, "bf16", "bf16")
    assert Wire.of({"weights": "int8"}).format("activations") is None


WIRES = ("bf16", "fp8", "int8", {"weights": "fp8", "gradients": "bf16"})
# Of norms: what the roundings of a block of two products come to.
TOLERANCES = {"bf16": 2e-2, "fp8": 0.15, "int8": 6e-2, "mixed": 0.15}


def blocks(sizes, scheme, movers):
    """Outputs and gradients of every wire against those of none: near, alike in chunks, the same bits by any mover."""
    grid, found = Grid(sizes), {}
    dense = nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 48))
    for wire in (None, *WIRES):
        results = {}
        for chunks in (1, 2):
            for mover in movers if chunks == 1 else movers[:1]:
                mesh = ProcessGrid(grid, wire=wire, collectives=mover, timeout=60)
                block = ndtp.nn.MLP.from_dense(dense[0], dense[2], "gelu", mesh=mesh, scheme=scheme, chunks=chunks)
                x = torch.randn(32, 48, generator=torch.Generator().manual_seed(1))
                mine = block.in_layout.shard(x, mesh.rank).requires_grad_()
                with CommMeter() as meter:
                    y = block(mine)
                    (y * torch.linspace(1, 2, y.shape[-1])).sum().backward()
                    grads = [p.grad.to_local().clone() for p in block.parameters()]
                results[chunks, mover] = ([y.detach(), mine.grad, *grads], meter.volume.total)
        assert len({moved for _, moved in results.values()}) == 1, f"{wire}: as many bytes in any chunks"
        (first, moved), *of_others = (results[1, mover] for mover in movers)
        for other, _ in of_others:
            assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True)), f"{wire}: other bits"
        # Products of other numbers of rows may round otherwise before anything travels.
        assert all((a - b).norm() < 1e-2 * b.norm() for a, b in zip(results[2, movers[0]][0], first, strict=True)), wire
        found[str(wire)] = first, moved
    plain, moved = found.pop("None")
    for wire, (mine, bytes_of_it) in found.items():
        allowed = TOLERANCES.get(wire, TOLERANCES["mixed"])
        for a, b in zip(mine, plain, strict=True):
            error = float((a - b).norm() / b.norm().clamp(min=1e-6))
            assert error < allowed, f"{wire}: off by {error:.3f}"
        share = bytes_of_it / moved
        least = {"bf16": 0.5, "fp8": 0.3, "int8": 0.3}.get(wire, 0.76)
        assert share == least if wire == "bf16" else share < least, f"{wire} moves {share:.2f} of the bytes"


@pytest.mark.parametrize(
    ("sizes", "scheme", "movers"),
    [
        ({"x": 2, "y": 2}, "2d", ("torch", "symmetric")),
        ({"z": 2, "y": 2}, "3d", ("torch",)),
        ({"dp": 2, "x": 2}, "1d-sp", ("torch",)),
    ],
)
def test_blocks(ranks, sizes, scheme, movers):
    ranks(4).run(blocks, sizes, scheme, movers)


def whole_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    losses, shares, volumes = {}, {}, {}
    for wire in (None, "bf16", "fp8"):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=64, **sizes))
        mesh = ProcessGrid(Grid(dp=2, z=1, y=2, x=1), wire=wire, timeout=60)
        ndtp.parallelize(model, mesh, scheme="3d", chunks=1)
        ids = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(0))
        with CommMeter() as meter:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            for parameter in model.parameters():
                parameter.grad.to_local()  # ends what is still on its way
        losses[wire], volumes[wire] = float(loss), (meter.volume.total, model.ndtp_report.volume(4, 8).total)
        shares[wire] = meter.volume.total
    assert abs(losses["bf16"] - losses[None]) < 1e-2 and abs(losses["fp8"] - losses[None]) < 5e-2
    assert all(measured == said for measured, said in volumes.values()), volumes
    assert shares["fp8"] < shares["bf16"] < 0.65 * shares[None], shares


def test_a_whole_model_moves_what_its_report_says(ranks):
    pytest.importorskip("transformers")
    ranks(4).run(whole_model)
