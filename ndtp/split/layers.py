"""Functions of whole layers: norms, dropout, convolutions and pools, losses."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn._reduction import get_enum

from ndtp.compute.torch_calls import TorchFunction
from ndtp.compute.traces import is_autocast_on
from ndtp.errors import LayoutError
from ndtp.nn.losses import cross_entropy
from ndtp.nn.random import draw_key, uniform_at
from ndtp.ops.losses import dtype_of_loss
from ndtp.ops.norms import NormPlan, default_eps, norm
from ndtp.split.along import sum_of_ranks
from ndtp.split.copies import written
from ndtp.split.elementwise import elementwise
from ndtp.split.moving import NO_AXES, brought
from ndtp.split.spec import Spec, layout_of
from ndtp.split.tensor import SplitTensor, enter, integers, leave, rule, split_in
from ndtp.split.views import with_dims_at, without
from ndtp.split.whole import whole


@rule(F.dropout, torch.dropout, torch.dropout_, F.alpha_dropout, F.feature_alpha_dropout)
def dropout(func: TorchFunction, x: object, p: float = 0.5, *args: object, **kwargs: object) -> Any:
    """This rank's part of one mask for the whole."""
    training, inplace = (*args, *list(kwargs.values())[len(args) :], *(True, False)[len(args) + len(kwargs) :])[:2]
    training, inplace = kwargs.get("training", kwargs.get("train", training)), kwargs.get("inplace", inplace)
    if not isinstance(x, SplitTensor) or not x.spec.sizes or func in (F.alpha_dropout, F.feature_alpha_dropout):
        return NotImplemented
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout: p={p} is not in [0, 1]")
    if not training or p == 0.0:
        return x
    if x.spec.sections:
        x = without(x, [len(x.spec.sizes) - 1])
    spec, shard = x.spec, leave(x)
    # Padding has no part in the mask, so grids that pad otherwise draw the same one.
    places = [torch.arange(part.start, part.stop, device=shard.device) for part in map(spec.here, range(shard.dim()))]
    kept = uniform_at(spec.sizes, places, draw_key("dropout", shard.device)) >= p
    dropped = shard * (kept.to(shard.dtype) / (1.0 - p or 1.0))
    if inplace or func is torch.dropout_:
        with torch._C.DisableTorchFunctionSubclass():
            x.copy_(dropped)
        written(x)
        return x
    return enter(dropped, spec)


_signature = cache(signature)


@rule(F.embedding, F.embedding_bag)
def look_up(func: TorchFunction, ids: object, weight: Any, *args: object, **kwargs: object) -> object:
    """Rows of a table: each rank looks up its features of every row, or of its own rows, which are summed then.

    A gradient that would be sparse is a dense one, of which autograd can make the table's.
    """
    if not isinstance(weight, SplitTensor):
        return NotImplemented
    given = _signature(func).bind(ids, weight, *args, **kwargs).arguments
    factors = given.get("per_sample_weights")
    if given.get("max_norm") or (isinstance(factors, Tensor) and factors.requires_grad):
        return NotImplemented  # it needs whole rows
    spec = weight.spec
    if spec.dims[0]:
        if func is not F.embedding or given.get("scale_grad_by_freq"):
            return NotImplemented
        ids, padding = whole(ids), given.get("padding_idx")
        if not isinstance(ids, Tensor) or 2 * ids.numel() > spec.sizes[0]:  # the table sends less than the sum
            return func(ids, whole(weight), padding)
        return _look_up_own(ids, weight, padding)
    others = {name: whole(x) for name, x in given.items() if name not in ("weight", "sparse")}
    y = func(**others, weight=leave(weight))
    lead = y.shape[:-1]
    layout = layout_of(spec.mesh, [*[NO_AXES] * len(lead), spec.dims[1]])
    made = Spec(spec.context, (*lead, spec.sizes[1]), layout, (*lead, spec.padded[1]), spec.sections, spec.origin)
    return enter(y, made)


def _look_up_own(ids: Tensor, weight: SplitTensor, padding: int | None) -> object:
    """Rows of a table whose rows are split, too: the sum over ranks of what each has of them."""
    spec, shard, (rows, _) = weight.spec, leave(weight), weight.spec.sizes
    here = spec.here(0)
    is_own, is_row = (ids >= here.start) & (ids < here.stop), (ids >= 0) & (ids < rows)
    index = torch.where(is_row, torch.where(is_own, ids - here.start, 0), len(shard))  # torch refuses what is no row
    place = None if padding is None else padding % rows - here.start
    found = F.embedding(index, shard, place if place is not None and 0 <= place < len(shard) else None)
    dims, lead = [*[NO_AXES] * ids.dim(), spec.dims[1]], tuple(ids.shape)
    made = Spec(
        spec.context, (*lead, spec.sizes[1]), layout_of(spec.mesh, dims), (*lead, spec.padded[1]), spec.sections,
        spec.origin,
    )  # fmt: skip
    y = sum_of_ranks(found.masked_fill(~is_own.unsqueeze(-1), 0.0), made.layout, made, spec.dims[0])
    return enter(y, made) if made.axes else y


@rule(F.layer_norm, torch.layer_norm)
def layer_norm(
    func: TorchFunction,
    x: Tensor,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *rest: Any,
) -> object:
    return _normed(x, normalized_shape, weight, bias, eps, True)


@rule(F.rms_norm, torch.rms_norm)
def rms_norm(
    func: TorchFunction, x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> object:
    if isinstance(x, SplitTensor) and eps is None:
        eps = default_eps(x.dtype)
    return _normed(x, normalized_shape, weight, None, eps, False)


def _check_sizes(what: str, sizes: Sequence[int], **given: Tensor | None) -> None:
    """Refuse operands of sizes that dense refuses, on every rank: those of a shard, or of what would broadcast.

    Raises:
        LayoutError: the operand, its sizes, and those that it is to have.
    """
    for name, x in given.items():
        if x is not None and tuple(x.shape) != tuple(sizes):
            raise LayoutError(f"{what}: {name} is {tuple(x.shape)}\n  fix: give one of {tuple(sizes)}")


def _normed(x: Any, shape: Any, weight: Tensor | None, bias: Tensor | None, eps: Any, centred: bool) -> Any:
    """Normalise over the last dims: moments of a row are merged over the axes that split them, and nothing else
    moves.
    """
    shape = tuple(integers(shape))
    if not isinstance(x, SplitTensor):
        x, own, other = whole(x), whole(weight), whole(bias)
        return F.layer_norm(x, shape, own, other, eps) if centred else F.rms_norm(x, shape, own, eps)
    what = f"norm over the last dims of {tuple(x.shape)}"
    if not shape or tuple(x.shape[-len(shape) :]) != shape:
        raise LayoutError(f"{what}: they are not {shape}\n  fix: normalized_shape={tuple(x.shape[-1:])}")
    _check_sizes(what, shape, weight=weight, bias=bias)
    count = len(x.spec.sizes)
    if x.spec.sections:
        x = without(x, [count - 1])
    last = x.spec.dims[-1]
    if len(shape) > 1 or not last:
        x = without(x, range(count - len(shape), count))
        y = F.layer_norm(leave(x), shape, None, None, eps) if centred else F.rms_norm(leave(x), shape, None, eps)
        y = enter(y, x.spec)
    else:
        spec = x.spec
        rows = leave(x).flatten(0, -2) if count > 1 else leave(x).unsqueeze(0)
        axes = tuple(axis for names in spec.dims[:-1] for axis in names)
        plan = NormPlan(
            layout_of(spec.mesh, [axes, last]), spec.sizes[-1], spec.padded[-1], centred, eps, spec.origin or "norm"
        )
        made = norm(rows.contiguous(), None, None, plan, spec.mesh)
        y = enter(made.view(spec.local), spec)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


@rule(F.batch_norm)
def batch_norm(
    func: TorchFunction, x: Any, running_mean: Any = None, running_var: Any = None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> object:  # fmt: skip
    """Normalise by the statistics of each channel, which move where samples or places are split."""
    if not isinstance(x, SplitTensor) or len(x.spec.sizes) < 2:
        return NotImplemented
    given = {"weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var}
    _check_sizes(f"batch_norm of {tuple(x.shape)}", x.shape[1:2], **given)
    count = len(x.spec.sizes)
    others = [d for d in range(count) if d != 1]
    mean, var = running_mean, running_var
    form = [-1 if d == 1 else 1 for d in range(count)]
    if training:
        mean = x.mean(others)
        var = (x - mean.view(form)).square().mean(others)
        number = x.numel() // x.shape[1]
        with torch.no_grad():
            for running, now in ((running_mean, mean), (running_var, var * number / max(number - 1, 1))):
                if running is not None:
                    running.lerp_(whole(now).to(running.dtype), momentum)
    y = (x - mean.view(form)) * torch.rsqrt(var.view(form) + eps)
    y = y if weight is None else y * weight.view(form)
    return y if bias is None else y + bias.view(form)


# Functions of [N, C, ..]: N may be split, all else is whole.
PER_SAMPLE = {
    "conv1d": 1, "conv2d": 2, "conv3d": 3, "conv_transpose1d": 1, "conv_transpose2d": 2, "conv_transpose3d": 3,
    "max_pool1d": 1, "max_pool2d": 2, "max_pool3d": 3, "avg_pool1d": 1, "avg_pool2d": 2, "avg_pool3d": 3,
    "adaptive_avg_pool1d": 1, "adaptive_avg_pool2d": 2, "adaptive_avg_pool3d": 3, "adaptive_max_pool1d": 1,
    "adaptive_max_pool2d": 2, "lp_pool1d": 1, "lp_pool2d": 2, "max_pool2d_with_indices": 2, "interpolate": 0,
    "upsample": 0, "pixel_shuffle": 2, "pixel_unshuffle": 2, "group_norm": 0, "unfold": 2,
    "fold": 2, "pad": -1, "prelu": 0, "channel_shuffle": 0,
}  # fmt: skip


@rule(*{getattr(place, name) for name in PER_SAMPLE for place in (F, torch) if hasattr(place, name)})
def per_sample(func: TorchFunction, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Convolutions, pools and the like: of samples of this rank, by weights that every rank has whole."""
    name = func.__name__.removeprefix("boolean_dispatch.<locals>.")
    if not isinstance(x, SplitTensor):  # a weight is split, as it is stored
        return func(x, *map(whole, args), **{key: whole(y) for key, y in kwargs.items()})
    count = len(x.spec.sizes)
    spatial = PER_SAMPLE.get(name, 0)
    if count < 2 or (spatial > 0 and count != spatial + 2):
        return NotImplemented
    lost = list(range(1, count))
    if spatial < 0:  # pad: dims that get nothing stay as they are
        pads = list(args[0] if args else kwargs["pad"])
        lost = [d for d in range(count) if any(pads[2 * (count - 1 - d) : 2 * (count - d)])]
        if kwargs.get("mode", args[1] if len(args) > 1 else "constant") != "constant":
            lost = list(range(1, count))
    x = without(x, lost)
    spec = x.spec
    if not spec.axes:
        return func(leave(x), *[whole(y) for y in args], **{k: whole(y) for k, y in kwargs.items()})
    context, every = spec.context, spec.axes

    def share(y: Any) -> Any:
        if not isinstance(y, Tensor):
            return y
        return brought(whole(y), context, [()] * y.dim(), list(y.shape), every)

    result = func(leave(x), *map(share, args), **{k: share(y) for k, y in kwargs.items()})
    outs = [result] if isinstance(result, Tensor) else list(result)
    made = []
    for out in outs:
        sizes = list(out.shape)
        for d in x.spec.split_dims:
            sizes[d] = spec.sizes[d]
        made.append(enter(out, with_dims_at(spec, sizes, list(range(count)))))
    return made[0] if isinstance(result, Tensor) else type(result)(made)


@rule(F.instance_norm)
def instance_norm(
    func: TorchFunction, x: Any, running_mean: Any = None, running_var: Any = None, weight: Tensor | None = None,
    bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> object:  # fmt: skip
    """Normalise each channel of a sample; running statistics are averages over all samples, split ones, too."""
    running = [each for each in (running_mean, running_var) if each is not None]
    if not isinstance(x, SplitTensor) or x.dim() < 3 or len(running) == 1:
        return NotImplemented
    given = {"weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var}
    _check_sizes(f"instance_norm of {tuple(x.shape)}", x.shape[1:2], **given)
    if not use_input_stats or not running:
        return per_sample(func, x, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    y = per_sample(func, x, None, None, weight, bias, True, momentum, eps)
    with torch.no_grad():
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        places = list(range(2, x.dim()))
        for each, now in zip(running, (x.mean(places), x.var(places)), strict=True):
            each.lerp_(whole(now.mean(0)).to(each.dtype), momentum)
    return y


def _reduced(losses: Any, reduction: str) -> object:
    get_enum(reduction)  # torch's error for a word that means nothing
    return losses if reduction == "none" else losses.mean() if reduction == "mean" else losses.sum()


@rule(
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits, F.binary_cross_entropy,
    F.soft_margin_loss, F.poisson_nll_loss,
)  # fmt: skip
def pointwise_loss(
    func: TorchFunction, x: Tensor, target: Any, *args: object, reduction: str = "mean", **kwargs: Any
) -> object:
    """Losses that are computed element by element."""
    get_enum(reduction)
    if (
        kwargs.get("size_average") is not None
        or kwargs.get("reduce") is not None
        or args
        or split_in([*kwargs.values()])
    ):
        return NotImplemented
    if tuple(x.shape) != tuple(target.shape) or any(isinstance(y, Tensor) for y in kwargs.values()):
        return NotImplemented

    def losses(a: Tensor, b: Tensor) -> Tensor:
        result: Tensor = func(a, b, reduction="none", **kwargs)
        return result

    losses.__name__ = func.__name__
    return _reduced(elementwise(losses, x, target), reduction)


@rule(F.kl_div)
def kl_div(
    func: TorchFunction, x: Tensor, target: Any, size_average: object = None, reduce: object = None,
    reduction: str = "mean", log_target: bool = False,
) -> object:  # fmt: skip
    if size_average is not None or reduce is not None:
        return NotImplemented
    if is_autocast_on(x.device.type):  # which computes it in float32
        x, target = (y.float() if y.dtype in (torch.float16, torch.bfloat16) else y for y in (x, target))
    if log_target:
        losses = target.exp() * (target - x)
    else:
        losses = torch.xlogy(target, target) - target * x
    return losses.sum() / x.shape[0] if reduction == "batchmean" else _reduced(losses, reduction)


@rule(F.cross_entropy)
def cross_entropy_loss(
    func: TorchFunction, logits: Any, target: Any, weight: Tensor | None = None, size_average: object = None,
    ignore_index: int = -100, reduce: object = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> object:  # fmt: skip
    """Compute the loss of logits whose classes stay split; rows may be split, too."""
    if not isinstance(logits, SplitTensor) or size_average is not None or reduce is not None:
        return NotImplemented
    if target.is_floating_point() or isinstance(target, SplitTensor):
        return NotImplemented
    if logits.dim() > 1:
        sizes = (logits.shape[0], *logits.shape[2:])
        _check_sizes(f"cross_entropy '{logits.spec.origin}' of {tuple(logits.shape)}", sizes, target=target)
    if logits.dim() > 2:  # [N, C, d1, ..]
        logits = logits.movedim(1, -1)
        lead = logits.shape[:-1]
        loss = F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), target.reshape(-1), weight, ignore_index=ignore_index,
            reduction=reduction, label_smoothing=label_smoothing,
        )  # fmt: skip
        return loss.view(lead) if reduction == "none" else loss
    if logits.dim() != 2 or target.dim() != 1:
        return NotImplemented
    spec = logits.spec
    if not spec.axes or spec.sections:
        return func(
            whole(logits),
            target,
            whole(weight),
            ignore_index=ignore_index,
            reduction=reduction,
            label_smoothing=label_smoothing,
        )
    padded = F.pad(target, (0, spec.padded[0] - spec.sizes[0]), value=ignore_index)
    here = spec.here(0)
    layout, losses = spec.layout, spec.context.losses
    if losses is not None:
        layout = layout_of(spec.mesh, [(*spec.context.data, *spec.dims[0]), spec.dims[1]])
    loss = cross_entropy(
        leave(logits), padded[here.start : here.stop], layout=layout, mesh=spec.mesh, classes=spec.sizes[1],
        weight=weight, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction,
        name=spec.origin or "loss",
    ).to(dtype_of_loss(logits.dtype, target.device.type))  # fmt: skip
    if reduction != "none":
        return loss if losses is None else losses.note_loss(loss)
    rows = Spec(spec.context, spec.sizes[:1], layout_of(spec.mesh, spec.dims[:1]), spec.padded[:1], (), spec.origin)
    return enter(loss.view_as(loss), rows) if rows.axes else loss
