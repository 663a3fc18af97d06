"""Attention over a ring of ranks: equal to attention at once, forward and backward, in bytes that the plan tells."""

import torch
import torch.nn.functional as F
from products import mesh_of

from ndtp import CommMeter, Grid
from ndtp.algebra.ring_plan import RingPlan
from ndtp.ops.ring_attention import ring_attention


def check(sizes, axes, length, dtype, form):
    mesh = mesh_of(Grid(sizes))
    ranks = mesh.grid.size(axes)
    part = -(-length // ranks)
    generator = torch.Generator().manual_seed(1)
    draw = lambda heads: torch.randn(2, heads, length, 8, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    q, k, v, grad = draw(4), draw(2), draw(2), draw(4)
    mask = None if form != "mask" else torch.rand(2, 1, length, length, generator=generator) < 0.5
    for x in (q, k, v):
        x.requires_grad_()
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=form == "causal", enable_gqa=True)
    expected.backward(grad)
    index, more = mesh.grid.index(mesh.rank, axes), ranks * part - length
    here = slice(index * part, (index + 1) * part)
    mine = [F.pad(x.detach(), (0, 0, 0, more))[:, :, here].clone().requires_grad_() for x in (q, k, v)]
    plan = RingPlan(mesh.grid, axes, length, part, form == "causal")
    own = None if mask is None else F.pad(mask, (0, more, 0, more), value=True)[:, :, here]
    with CommMeter() as meter:
        out = ring_attention(*mine, plan, mesh, mask=own)
        out.backward(F.pad(grad, (0, 0, 0, more))[:, :, here])
    real = max(0, min(part, length - index * part))
    tolerance = {"rtol": 0.02, "atol": 0.02} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(out[:, :, :real], expected[:, :, here], **tolerance)
    for x, whole in zip(mine, (q, k, v), strict=True):
        torch.testing.assert_close(x.grad[:, :, :real], whole.grad[:, :, here], **tolerance)
    wide = torch.promote_types(dtype, torch.float32)
    assert meter.volume == plan.volume(*(x.shape for x in mine), dtype, wide)
    assert not mesh.collectives.in_flight


def test_equals_attention_at_once(ranks):
    """Parts of the sequence follow the axes that split it, in whichever order; process groups follow the grid."""
    for axes, form, length in ((("z", "x"), "causal", 13), (("x", "z"), "mask", 12)):
        ranks(4).run(check, {"z": 2, "x": 2}, axes, length, torch.float64, form)
    ranks(2).run(check, {"x": 2}, ("x",), 8, torch.bfloat16, "causal")


def check_wire(wire, sizes, causal, width_of_values=8):
    """Each rank attends to what the owner of a key has sent, which is what all others have, too."""
    mesh = mesh_of(Grid(sizes)).sending(wire)
    ranks, part, width = mesh.grid.size(tuple(sizes)), 6, width_of_values
    generator = torch.Generator().manual_seed(1)
    draw = lambda heads, width: torch.randn(2, heads, ranks * part, width, generator=generator)  # noqa: E731
    q, k, v, grad = draw(4, 8), draw(2, 8), draw(2, width), draw(4, width)

    def through_the_wire(x, kind):
        codec = mesh.collectives.codec((1, x.shape[-1]), x.dtype, kind)
        return (
            x
            if codec is None
            else codec.decode_rows(codec.encode_rows(x.flatten(0, -2)), x.shape[-1], x.dtype).view_as(x)
        )

    there = [q, *(through_the_wire(x, "activations") for x in (k, v))]
    for x in there:
        x.requires_grad_()
    expected = F.scaled_dot_product_attention(*there, is_causal=causal, enable_gqa=True)
    expected.backward(grad)
    here = slice(mesh.grid.index(mesh.rank, tuple(sizes)) * part, None)
    mine = [x[:, :, here][:, :, :part].detach().clone().requires_grad_() for x in (q, k, v)]
    plan = RingPlan(mesh.grid, tuple(sizes), ranks * part, part, causal)
    with CommMeter() as meter:
        out = ring_attention(*mine, plan, mesh)
        out.backward(grad[:, :, here][:, :, :part])
    assert meter.volume == plan.volume(*(x.shape for x in mine), torch.float32, torch.float32, wire=mesh.wire)
    if not causal:  # no half is swapped: keys and values alone travel, and the sums of their gradients as they are
        torch.testing.assert_close(out, expected[:, :, here][:, :, :part])
        for x, whole in zip(mine, there, strict=True):
            torch.testing.assert_close(x.grad, whole.grad[:, :, here][:, :, :part])
        return
    near = {"bf16": 0.02, "int8": 0.05, "fp8": 0.3}[wire]
    for x, whole in zip((out, *(x.grad for x in mine)), (expected, *(x.grad for x in there)), strict=True):
        torch.testing.assert_close(x, whole[:, :, here][:, :, :part], rtol=near, atol=near)


def test_keys_and_values_travel_by_the_wire(ranks):
    for wire in ("bf16", "int8", "fp8"):
        ranks(2).run(check_wire, wire, {"x": 2}, False)
        ranks(2).run(check_wire, wire, {"x": 2}, True)
    ranks(4).run(check_wire, "fp8", {"z": 2, "x": 2}, True)
    ranks(2).run(check_wire, "int8", {"x": 2}, False, 1)  # values of which a scale would be more than half
