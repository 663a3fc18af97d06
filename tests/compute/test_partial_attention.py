"""Parts of attention merged by their log-sum-exps: equal to torch's attention at once, forward and backward."""

import pytest
import torch
import torch.nn.functional as F

from ndtp.algebra.attention_pieces import pieces
from ndtp.compute.attention import Sees, attend
from ndtp.compute.partial_attention import Gradients, Merged

LENGTH = 11
# Positions of the queries, and of the keys in the order in which they come: zigzag, and padding behind the sequence.
QUERIES = [range(0, 3), range(9, 12)]
BLOCKS = [[range(3, 6), range(6, 9)], [range(0, 3), range(9, 12)]]


def at(x, spans, form):
    padded = F.pad(x, (0, 0, 0, 12 - LENGTH), value=7.0)
    found = torch.cat([padded[..., span.start : span.stop, :] for span in spans], -2)
    return found.mT.contiguous().mT if form == "columns" else found


@pytest.mark.parametrize("features", [8, 6], ids=["kernel", "by hand"])
@pytest.mark.parametrize("form", ["causal", "all", "mask", "columns"])
def test_equals_attention_at_once(form, features):
    """ "columns": features do not follow one another in memory, and torch's kernel takes for granted that they do."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, LENGTH, 8, dtype=torch.float64), torch.randn(2, 2, LENGTH, 8, dtype=torch.float64)
    v = torch.randn(2, 2, LENGTH, features, dtype=torch.float64)
    mask = torch.rand(2, 1, LENGTH, LENGTH) < 0.5 if form == "mask" else None
    if mask is not None:
        mask[0, 0, 1] = False  # a query that sees nothing
    for x in (q, k, v):
        x.requires_grad_()
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=form == "causal", enable_gqa=True)
    grad = torch.randn_like(expected)
    here = [i for span in QUERIES for i in span if i < LENGTH]
    only = torch.zeros_like(grad)
    only[..., here, :] = grad[..., here, :]
    expected.backward(only)

    queries, upstream = at(q.detach(), QUERIES, form), at(grad, QUERIES, form)
    merged = Merged(queries, features)
    places = []
    for keys in BLOCKS:
        columns = [i for span in keys for i in span]
        seen = None
        if mask is not None:
            wide = F.pad(mask, (0, 1, 0, 1), value=True)
            seen = wide[..., [i for span in QUERIES for i in span], :][..., columns]
        parts = pieces(QUERIES, keys, LENGTH, form == "causal")
        places.append((keys, parts, seen))
        merged.see(queries, at(k.detach(), keys, form), at(v.detach(), keys, form), parts, 8**-0.5, seen)
    torch.testing.assert_close(merged.out[..., : len(here), :], expected[..., here, :].detach())
    back = Gradients(upstream, queries, merged.out, merged.lse, 8**-0.5)
    for keys, parts, seen in places:
        dk, dv = back.see(at(k.detach(), keys, form), at(v.detach(), keys, form), parts, seen)
        real = [i for span in keys for i in span if i < LENGTH]
        torch.testing.assert_close(dk[..., : len(real), :], k.grad[..., real, :])
        torch.testing.assert_close(dv[..., : len(real), :], v.grad[..., real, :])
    torch.testing.assert_close(back.dq[..., : len(here), :], q.grad[..., here, :])


@pytest.mark.parametrize("begin, end, past", [(3, 7, 0), (0, 4, 5), (6, 7, 0)])
def test_queries_behind_others_take_no_mask_of_positions(begin, end, past, monkeypatch):
    """Kernels know of a triangle, and of no offset: what lies in front of it is a product of its own."""
    sees = Sees(causal=True)
    q, k, v = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in (
        (end - begin, 4, 8), (1, past + 7, 2, 8), (1, past + 7, 2, 8)
    ))  # fmt: skip
    queries, keys = torch.arange(past + begin, past + end), torch.arange(past + 7)
    seen = sees.mask(queries, keys)
    monkeypatch.setattr(Sees, "mask", None)
    ours = attend(q, k, v, (0, 0, 1, 1), begin, 7, sees, is_split=True)
    wide = [x.repeat_interleave(2, 2).transpose(1, 2) for x in (k, v)]
    theirs = F.scaled_dot_product_attention(q.transpose(0, 1)[None], *wide, attn_mask=seen)
    weights = torch.randn_like(ours)
    ours.mul(weights).sum().backward()
    grads = [x.grad.clone() for x in (q, k, v)]
    for x in (q, k, v):
        x.grad = None
    theirs[0].transpose(0, 1).mul(weights).sum().backward()
    torch.testing.assert_close(ours, theirs[0].transpose(0, 1))
    torch.testing.assert_close(grads, [x.grad for x in (q, k, v)])


def test_only_rows_of_one_rank_refuse_a_gradient_of_their_gradient():
    """A dense twin behind a cache has one, as torch's attention has."""
    q, k, v = (torch.randn(size, 2, 4, dtype=torch.float64, requires_grad=True) for size in (2, 5, 5))
    core = lambda *x, **more: attend(x[0], x[1][None], x[2][None], (0, 1), 0, 2, Sees(causal=True), **more)  # noqa: E731
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(core, (q, k, v))
    y = core(q, k, v, is_split=True)
    with pytest.raises(RuntimeError, match="cannot be differentiated again, and create_graph=True"):
        torch.autograd.grad(y.sum(), q, create_graph=True)
