"""Every kind of function that has a rule, on split tensors of several layouts, against dense: results and gradients."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ndtp
from ndtp.errors import LayoutError
from ndtp.split import Context, SplitTensor, cut, enter, guard_functions, leave, spec_of, whole

HEADS = (4, 6, 4, 2)


def heads(x: Tensor) -> Tensor:
    return x.view(*HEADS).transpose(1, 2)


def set_rows(x: Tensor) -> Tensor:
    x[:, 0] = 0.0
    return x


def set_part(x: Tensor) -> Tensor:
    """Features of which some are changed by a subscript, by itself, and by a slice of that slice."""
    x = x * 1
    x[..., :2] += torch.arange(2.0)
    part = x[..., 2:7]
    part.mul_(3.0)
    part[..., 1].neg_()
    return x


def rows_of_gathered(x: Tensor) -> Tensor:
    """A product of what was gathered for it, whose dims are changed in place."""
    scores = torch.bmm(x.reshape(2, 12, 8), x.reshape(2, 12, 8).mT)
    scores = scores.view(4, 6, 12)
    scores.unsqueeze_(2).mul_(2.0)
    return scores


def written(x: Tensor, *writes: Callable[[Tensor], object]) -> Tensor:
    """Writes to views come to the tensor, and writes to the tensor are seen by views that were made before."""
    x = x * 1
    rows, parts = x.view(24, 8), x[1:3]  # of which dims are gathered in some layouts
    for write in writes:
        write(x)
    return torch.cat([x.flatten(), rows.flatten() * 2, parts.flatten() * 3])


def sized(z: Tensor) -> Tensor:
    return torch.linalg.vector_norm(z, dim=-1) + z.std(-1)


def rotary(q: Tensor) -> Tensor:
    angle = torch.arange(12.0).view(6, 2)
    return q * torch.cos(angle) + torch.cat([-q[..., 1:], q[..., :1]], -1) * torch.sin(angle)


def attention(q: Tensor, k: Tensor, **options: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, k, **options)


CASES = {
    "add": lambda x: x + 1.5 * x,
    "gelu": F.gelu,
    "broadcast": lambda x: x * torch.arange(8.0) + torch.arange(6.0)[:, None],
    "in place": lambda x: (x * 1).add_(x).relu_(),
    "parts of features": lambda x: x.view(4, 6, 2, 4),
    "heads": heads,
    "rows": lambda x: x.view(24, 8),
    "one sample a row": lambda x: x.reshape(4, 48),
    "flat": lambda x: x.flatten(),
    "there and back": lambda x: heads(x).transpose(1, 2).reshape(4, 6, 8),
    "squeeze": lambda x: x.view(4, 6, 8, 1).squeeze(-1),
    "chunk and cat": lambda x: torch.cat([p * (i + 1) for i, p in enumerate(x.chunk(2, -1))], -1),
    "softmax": lambda x: x.softmax(-1) + x.softmax(1),
    "mean": lambda x: x.mean(-1, keepdim=True) + x.mean(),
    "var": lambda x: x.var(-1) + x.std(),
    "layer norm": lambda x: F.layer_norm(x, (8,), torch.arange(8.0), torch.ones(8)),
    "rms norm": lambda x: F.rms_norm(x, (8,)),
    "rms norm by hand": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "scores": lambda x: (heads(x) @ heads(x).mT).softmax(-1) @ heads(x),
    "all features": lambda x: x @ x.transpose(-1, -2),
    "few features": lambda x: F.linear(x, torch.arange(24.0).view(3, 8) / 8),
    "many features": lambda x: F.linear(x, torch.arange(128.0).view(16, 8) / 64, torch.arange(16.0)),
    "einsum": lambda x: torch.einsum("bqhd,bkhd->bhqk", x.view(*HEADS), x.view(*HEADS)),
    "tensordot": lambda x: torch.tensordot(torch.tensordot(x, x[:, 0], ([0], [0])), torch.arange(64.0).view(8, 8) / 64),
    "tensors of one size": lambda x: torch.stack(torch.broadcast_tensors(x.to_dense(), x[:1], torch.arange(8.0))),
    "rows of a table": lambda x: F.embedding(torch.tensor([[1, 23, 7], [7, 5, 14]]), x.reshape(24, 8), -1),
    "einsum of features": lambda x: torch.einsum("bnd,bmd->bnm", x, x),
    "causal": lambda x: attention(heads(x), heads(x), is_causal=True),
    "masked": lambda x: attention(heads(x), heads(x), attn_mask=torch.ones(4, 1, 6, 6, dtype=torch.bool).tril()),
    "memory": lambda x: x.transpose(0, 1).as_strided((3, 6, 8), (8, 32, 1)),
    "one query for all": lambda x: attention(heads(x)[:1] + 0.0, heads(x)),
    "queries of one sample": lambda x: attention(x[:1] + 0.0, x),
    "one key for all": lambda x: attention(heads(x), heads(x)[:1] + 0.0),
    "two key heads": lambda x: attention(heads(x), x[..., :4].view(4, 6, 2, 2).transpose(1, 2), enable_gqa=True),
    "one key head": lambda x: attention(heads(x), x[..., :2].view(4, 6, 1, 2).transpose(1, 2), enable_gqa=True),
    "rotary": lambda x: rotary(heads(x)),
    "first token": lambda x: x[:, 0],
    "last tokens": lambda x: x[:, -2:],
    "samples": lambda x: x[1:3],
    "every second feature": lambda x: x[..., ::2],
    "tokens by index": lambda x: x[:, torch.tensor([1, 0, 2])],
    "a token each": lambda x: x[torch.arange(4), torch.tensor([1, 0, 2, 3])],
    "by a mask of all": lambda x: x[x.detach() > 0],
    "by a mask of samples": lambda x: x[torch.tensor([True, False, True, True])],
    "new dims": lambda x: x[:, None, ..., None],
    "cat": lambda x: torch.cat([x, x * 2], 1),
    "cat with a whole one": lambda x: torch.cat([x, torch.ones(4, 6, 8)], -1),
    "class token": lambda x: torch.cat([torch.ones(1, 1, 8).expand(4, -1, -1), x], 1),
    "stacks": lambda x: torch.hstack([x, x * 2]) + torch.vstack([x[:2], x, x[2:]]).view(4, 12, 8),
    "triangles": lambda x: x.tril() + x.triu(1) * 2,
    "stack": lambda x: torch.stack([x, x + 1], 2),
    "topk": lambda x: x.topk(2, -1)[0],
    "sort": lambda x: x.sort(1).values,
    "max": lambda x: x.max(-1).values + x.amax(),
    "norm": lambda x: x.norm(dim=-1),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "where": lambda x: torch.where(x > 0, x, torch.zeros(())),
    "masked fill": lambda x: x.masked_fill(torch.ones(6, 1, dtype=torch.bool).tril(), 0.0),
    "set rows": lambda x: set_rows(x * 1),
    "glu": lambda x: F.glu(x, -1),
    "cumsum": lambda x: x.cumsum(1),
    "repeat": lambda x: x.repeat(1, 2, 1) + x.repeat_interleave(2, 1),
    "expand": lambda x: x[:, :, None].expand(-1, -1, 3, -1),
    "roll": lambda x: x.roll(1, 1),
    "mse": lambda x: F.mse_loss(x, torch.ones(4, 6, 8)),
    "cross entropy": lambda x: F.cross_entropy(x.view(-1, 8), torch.arange(24) % 8),
    "cross entropy of maps": lambda x: F.cross_entropy(x.transpose(1, 2), torch.arange(24).view(4, 6) % 8),
    "convolution": lambda x: F.conv1d(x, torch.arange(54.0).view(3, 6, 3) / 10),
    "unfold": lambda x: x.unfold(1, 2, 2),
    "permute": lambda x: x.permute(2, 0, 1),
    "a bound that is a tensor": lambda x: x.clamp(min=torch.tensor(0.1)),
    "all pairs": lambda x: x[:, :, None, :] + x[:, None, :, :],
    "sums of different dims": lambda x: x.sum(0) + x.sum(1, keepdim=True),
    "index select": lambda x: x.index_select(1, torch.tensor([0, 2])),
    "gather": lambda x: x.gather(1, torch.zeros(4, 2, 8, dtype=torch.long)),
    "pad": lambda x: F.pad(x, (0, 0, 1, 1)),
    "vector": lambda x: x @ torch.arange(8.0),
    "number first": lambda x: torch.sub(1, x) + torch.pow(2, x),
    "compared": lambda x: (x > 0).float() * x,
    "uneven parts": lambda x: x.split([2, 4, 2], -1)[1],
    "pooled head": lambda x: (x.mean(1) @ torch.arange(32.0).view(8, 4)).relu(),
    "logsumexp": lambda x: x.logsumexp(-1),
    "a number of it": lambda x: x * x.sum().detach().item(),
    "a part of it": set_part,
    "gathered, in place": rows_of_gathered,
    "kl": lambda x: F.kl_div(x.log_softmax(-1), x.detach().softmax(-1), size_average=None, reduction="sum"),
    "unbind": lambda x: x.unbind(1)[2],
    "batch norm": lambda x: F.batch_norm(x, None, None, torch.arange(6.0), torch.ones(6), True),
    "batch norm as trained": lambda x: F.batch_norm(x, torch.arange(6.0), torch.arange(6.0) + 1),
    "group norm": lambda x: F.group_norm(x, 2),
    "three in one": lambda x: x.reshape(4, 6, 2, 2, 2).permute(2, 0, 3, 1, 4)[0],
    "interpolate": lambda x: F.interpolate(x, scale_factor=2),
    "writes to places": lambda x: written(x, lambda y: y[0].mul_(2), lambda y: y[..., 3:].zero_()),
    "writes to parts": lambda x: written(x, lambda y: y.narrow(-1, 4, 4).add_(1), lambda y: y.view(-1)[5:9].fill_(1)),
    "writes by index": lambda x: written(x, lambda y: y.__setitem__([0, 2], 0.5), lambda y: y[:, [1]].tanh_()),
    "writes of values with ones in front": lambda x: written(
        x,
        lambda y: y.__setitem__((1, slice(1, 3)), x[:1, 3:5] * 2),
        lambda y: y.__setitem__((2, 0), torch.arange(8.0).view(1, 1, 1, 8)),
        lambda y: y.__setitem__(slice(3, 4), x[None, 0]),
    ),
    "writes to a copy": lambda x: written(x, lambda y: y.mT.reshape(-1).zero_(), lambda y: y.mT.contiguous().add_(1)),
    "writes to what is not the first operand": lambda x: written(
        x,
        lambda y: torch.square(y.detach(), out=y.detach()),
        lambda y: torch.sort(y.detach(), -1, out=(y.detach(), torch.empty(4, 6, 8, dtype=torch.long))),
        lambda y: torch.nn.init.constant_(y[:, 1], 3.0),
        lambda y: torch._foreach_mul_([y[2], y[3, 5]], 2.0),
        lambda y: torch.neg_(input=y[..., :3]),
        lambda y: F.elu(y[0], 1.0, True),
    ),
    "writes to what is expanded": lambda x: written(
        x,
        lambda y: y[:1].expand(4, 6, 8).diagonal(0, 0, 1).fill_(0.5),
        lambda y: y[1:2].expand(4, 6, 8)[2, 1:3].mul_(3),
    ),
    "all of a dim by its size": lambda x: x.narrow(0, 0, 4).narrow(-1, 0, 8),
    "divergence": lambda x: F.kl_div(x.log_softmax(-1), torch.full((4, 6, 8), 0.125), reduction="batchmean"),
    "axes as NumPy names them": lambda x: torch.linalg.vector_norm(x, axis=-1) + x.sum(axis=-1, keepdims=True)[..., 0],
    "pairs that are turned": lambda x: torch.view_as_real(
        torch.view_as_complex(x.unflatten(-1, (-1, 2))) * TURN
    ).flatten(2),
    "parts of complex numbers": lambda x: written(torch.complex(x, x * 2), lambda y: y.imag.mul_(3)).imag,
    "parts of complex numbers that are set": lambda x: (
        written(
            torch.complex(x, x * 2),
            lambda y: setattr(y, "real", torch.arange(8.0).expand(4, 6, 8)),
            lambda y: setattr(y, "imag", y.imag + y.real),
        ).imag
    ),
    "sizes of complex numbers": lambda x: sized(torch.complex(x, x * 2)),
    "norms of matrices": lambda x: torch.linalg.norm(x, 1, dim=(1, 2)),
    "std of nothing": lambda x: (x - x).std(-1),
    "several quantiles": lambda x: x.quantile(torch.tensor([0.25, 0.5]), 1) + x.quantile(0.5, 1),
    "norms of what a dim has": lambda x: x.renorm(2, 1, 1.5),
    "runs of what is equal": lambda x: (x > 0).unique_consecutive(dim=1).sum() * x,
    "places along a dim": lambda x: torch.cat(
        [
            x.take_along_dim(x.argsort(1), 1),
            x.take_along_dim(torch.tensor([[[0], [-1]]]), 1),
            x[:1, :2].expand(4, 2, 8),
        ],
        1,
    ),
    "differences of what is joined": lambda x: torch.diff(x, 2, 1, prepend=torch.ones(4, 1, 8), append=x[:, :2]),
    "likeness of what is broadcast": lambda x: F.cosine_similarity(x[:, None], x[:1], -2),
    "an axis that torch calls so": lambda x: torch.segment_reduce(x, "sum", lengths=torch.tensor([1, 3]), axis=0),
    "a gradient without memory": lambda x: x.sgn(),
    "in place behind": lambda x: F.relu(F.linear(x, torch.arange(24.0).view(3, 8) / 8), inplace=True),
}
TURN = torch.polar(torch.ones(6, 4), torch.arange(24.0).view(6, 4))
LAYOUTS = {
    "samples and features": (("y",), (), ("x",)),
    "samples": (("y", "x"), (), ()),
    "features": ((), (), ("x", "y")),
    "tokens and features": ((), ("y",), ("x",)),
    "tokens, padded": ((), ("x", "y"), ()),
}


def check_rules() -> list[str]:
    mesh = ndtp.ProcessGrid(ndtp.Grid(x=2, y=2))
    context, wrong = Context(mesh), []
    generator = torch.Generator().manual_seed(0)
    others = list(LAYOUTS)[1:]
    for number, (name, function) in enumerate(CASES.items()):
        for layout in (next(iter(LAYOUTS)), others[number % len(others)]):
            dims = LAYOUTS[layout]
            numbers = torch.randn(4, 6, 8, generator=generator)
            dense, own = numbers.clone().requires_grad_(), numbers.clone().requires_grad_()
            expected = function(dense)
            spec = spec_of(context, (4, 6, 8), dims)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = function(enter(cut(own, spec), spec))
            factors = torch.randn(expected.shape, generator=generator)
            if expected.requires_grad:
                (expected * factors).sum().backward()
                (result * factors).sum().backward()
                if not torch.allclose(own.grad, dense.grad, rtol=1e-3, atol=1e-4):
                    wrong.append(f"{name} of {layout}: gradient")
            if result.shape != expected.shape or not torch.allclose(whole(result), expected, rtol=1e-4, atol=1e-4):
                wrong.append(f"{name} of {layout}: {getattr(result, 'spec', 'whole')}")
    whole_in = (
        *("setitem", "as_strided", "square", "sort of", "constant", "foreach"),
        *("quantile", "unique_consecutive", "take_along_dim", "segment_reduce"),
    )
    return [*wrong, *(key for key in context.gathered if not key.startswith(whole_in))]


def test_rules(ranks):
    """Nothing among the cases is without a rule, but for writes across dims that are split."""
    assert ranks(4).run(check_rules)[0] == []


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.as_tensor(x.detach().numpy() * 2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def odd_even(x: Tensor) -> Tensor:
    if torch.overrides.has_torch_function_unary(x):
        return torch.overrides.handle_torch_function(odd_even, (x,), x)
    return x[..., 0::2] - x[..., 1::2]


OVER_ROWS = (
    lambda y: y.mean(0), lambda y: y - y.sum(0, keepdim=True), lambda y: y.var(0), lambda y: y / y.std(0, keepdim=True),
    lambda y: y.norm(dim=0), lambda y: (y > 9).any(0), lambda y: (y > 9).sum(0), lambda y: y.sum(), lambda y: y.mean(1),
    lambda y: y.amax(0), lambda y: y.cumsum(0), lambda y: y.softmax(0), lambda y: F.normalize(y, dim=0),
    lambda y: F.batch_norm(y, None, None, training=True), lambda y: y.mean(0).chunk(2)[1],
)  # fmt: skip


def check_strangers():
    mesh = ndtp.ProcessGrid(ndtp.Grid(x=2))
    guard_functions()
    context = Context(mesh)
    spec = spec_of(context, (4, 6), (("x",), ()))
    numbers = torch.arange(24.0).view(4, 6)
    x = enter(cut(numbers.clone().requires_grad_(), spec), spec)
    with pytest.warns(UserWarning, match="Doubled has no rule") as told:
        y = Doubled.apply(x)  # code of somebody else sees the whole tensor
    assert told[0].filename == __file__  # where the code stands, not where ndtp warns
    assert torch.equal(y, numbers * 2) and not isinstance(y, SplitTensor)
    with pytest.warns(UserWarning, match="odd_even has no rule"):
        assert torch.equal(odd_even(x), odd_even(numbers))
    with pytest.warns(UserWarning, match="add writes into a tensor that every rank has whole, beside \\[4_x, 6\\]"):
        assert torch.equal(torch.zeros(4, 6).add_(x), numbers)
    with pytest.raises(IndexError):  # on every rank, though one has the last row
        F.embedding(torch.tensor([4]), x)
    ndtp.register_rule(odd_even, "batch")
    z = odd_even(x)
    assert z.spec.dims == (("x",), ()) and torch.equal(whole(z), odd_even(numbers))
    ndtp.register_rule(Doubled, lambda apply, x: enter(leave(x) * 2, x.spec))
    assert Doubled.apply(x).spec == spec
    with pytest.raises(LayoutError, match="memory"):
        x.data_ptr()
    y = x * 1
    y.select(0, 0).zero_()  # samples are split: what the view shows was gathered
    assert not whole(y)[0].any() and torch.equal(whole(y)[1:], numbers[1:])
    torch._foreach_mul_([y[2], y[3, 5:]], 2.0)  # each was gathered for itself
    assert torch.equal(whole(y)[2], numbers[2] * 2) and whole(y)[3, 5] == numbers[3, 5] * 2
    for overlapping in ([y[2], y[:, 5]], [y, y[1]], [y[:, 1], y], [y, y.view(-1)]):
        with pytest.raises(LayoutError, match="overlap"):
            torch._foreach_mul_(overlapping, 2.0)
    three = x[:, None]
    named = torch.zeros(4, 1, 1).baddbmm(batch1=three, batch2=three.mT, alpha=2)
    assert torch.equal(whole(named), 2 * (numbers[:, None] @ numbers[:, None].mT))
    with pytest.warns(UserWarning, match="matmul has no rule"):  # none that knows these names
        assert torch.equal(torch.matmul(input=x, other=torch.ones(6, 2)), numbers @ torch.ones(6, 2))
    wide, dense = (each.sum(-1, keepdim=True).expand(4, 6) for each in (x * 1, numbers))
    assert torch.equal(whole(wide.index_fill_(0, torch.tensor([0]), 7.0)), dense.index_fill_(0, torch.tensor([0]), 7.0))
    deep, some = torch.arange(48.0).view(2, 4, 6), torch.tensor([2, 0, 1])
    rows = spec_of(context, (2, 4, 6), ((), ("x",), ()))
    middle = enter(cut(deep.clone(), rows), rows)
    for key in (
        (-1, slice(None), some),
        (some % 2, slice(None), 3),
        (torch.tensor(1), slice(None), some),
        (np.int64(0), None, some),
        (slice(None), np.array([3, 0])),
    ):
        assert torch.equal(whole(middle[key]), deep[key]), "torch selects by numbers before it picks by indices"
        middle[key], deep[key] = middle[key] * 2, deep[key] * 2
        assert torch.equal(whole(middle), deep)
    middle = enter(cut((deep / 48).requires_grad_(), rows), rows)
    changed = F.scaled_dot_product_attention(middle, middle, middle).mul_(2.0)  # by a ring
    torch.testing.assert_close(whole(changed).detach(), attention(deep / 48, deep / 48) * 2)
    parts = dataclasses.replace(spec_of(context, (4, 6), [(), ("x",)]), sections=(2, 4))
    apart, together = (enter(cut(numbers, s), s) for s in (parts, dataclasses.replace(parts, sections=())))
    assert torch.equal(whole(apart + together), numbers * 2) and torch.equal(whole(together - apart), numbers * 0)
    for over_rows in OVER_ROWS:  # features keep the order that sections gave them
        torch.testing.assert_close(whole(over_rows(apart)), over_rows(numbers))
    for view in (Tensor.t, lambda y: y.t() * 1, lambda y: y.t()[:, 1:3], lambda y: y.t()[:, None].expand(6, 3, 4)):
        for draw in (torch.randn_like, lambda y: torch.zeros_like(y).uniform_(), lambda y: F.alpha_dropout(y, 0.5)):
            torch.manual_seed(5)
            drawn = draw(view(numbers))  # in the order of memory
            torch.manual_seed(5)
            assert torch.equal(whole(draw(view(x))), drawn)
    grads = []
    y = x * 3
    y.register_hook(grads.append)
    y.sum().backward()
    assert grads[0].shape == (4, 6) and torch.equal(whole(grads[0]), torch.ones(4, 6))
    return True


@pytest.mark.cpu
def test_strangers(ranks):
    assert all(ranks(2).run(check_strangers))


NORMS = (
    lambda x, weight: F.layer_norm(x, (6,), weight),
    lambda x, weight: F.rms_norm(x, (6,), weight),
    lambda x, bias: F.batch_norm(x, torch.zeros(6), torch.ones(6), None, bias),
)


def check_other_sizes() -> bool:
    """What dense refuses for its sizes is refused on every rank, where it has the sizes of a shard as elsewhere."""
    context = Context(ndtp.ProcessGrid(ndtp.Grid(x=2)))
    for dims in ([("x",), ()], [(), ("x",)]):
        spec = spec_of(context, (8, 6), dims)
        x = enter(cut(torch.randn(8, 6), spec), spec)
        for rows in (4, 7, 9, 16):
            with pytest.raises(LayoutError, match=rf"target is \({rows},\)\n  fix: give one of \(8,\)"):
                F.cross_entropy(x, torch.zeros(rows, dtype=torch.long))
        for norm in NORMS:
            for size in (1, 3, 12):
                with pytest.raises(LayoutError, match=r"give one of \(6,\)"):
                    norm(x, torch.ones(size))
        for loss in (F.mse_loss, F.soft_margin_loss, F.kl_div):
            with pytest.raises(ValueError, match="sums is not a valid value for reduction"):
                loss(x, torch.zeros(8, 6), reduction="sums")
        for key, sizes in ((1, (3,)), (slice(0, 8), (4, 6)), (slice(0, 8), (2, 8, 6))):
            with pytest.raises(RuntimeError, match="expand"):
                x[key] = torch.ones(sizes)
    return True


def test_other_sizes(ranks):
    assert all(ranks(2).run(check_other_sizes))
