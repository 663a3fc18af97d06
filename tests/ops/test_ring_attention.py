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
