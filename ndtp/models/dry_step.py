"""The traffic of a training step of a whole model, whatever its code does between the layers.

A step's traffic is that of every plan that it runs, for the rows that come there: those of a sequence or of one that is
attended to, those that a head picks, the patches of an image.  The model's own code says which.  So it runs, both ways,
on tensors that have shapes and no memory and on a grid that sends nothing (`ndtp.runtime.dry_grid`); there
each collective counts as the algebra of its step has it.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ndtp.algebra.volume import Volume
from ndtp.compute.torch_calls import Arguments, Keywords, TorchFunction
from ndtp.errors import LayoutError
from ndtp.models.forms import forms_of_results
from ndtp.models.hidden import Hidden, leave
from ndtp.models.state_beside import kept_beside, random_kept
from ndtp.nn.sharded import shadow_of
from ndtp.runtime.process_grid import ProcessGrid
from ndtp.split.tensor import SplitTensor
from ndtp.split.tensor import leave as bare

IMAGES = "pixel_values"


class OfWholeBatches(TorchFunctionMode):
    """Answers where code asks for numbers that are not there: all is as it should be, there is no padding."""

    def __torch_function__(
        self, func: TorchFunction, types: object, args: Arguments = (), kwargs: Keywords | None = None
    ) -> object:
        if func is Tensor.__bool__ and args[0].is_meta:
            return True
        if func is Tensor.__contains__ and args[0].is_meta:  # the token of padding among ids
            return False
        if func in (torch.bincount, Tensor.bincount) and args and args[0].is_meta:  # for which torch has no kernel
            return _counted(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention and all(type(x) is Tensor and x.is_meta for x in args[:3]):
            args = (*_of_one_dtype(args[:3]), *args[3:])
        result = func(*args, **(kwargs or {}))
        if func in (torch.any, Tensor.any) and isinstance(result, Tensor) and not result.dim() and result.is_meta:
            return torch.tensor(False)
        return result


def _of_one_dtype(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return queries, keys and values in the shortest of their dtypes, as autocast has them, which is none of meta."""
    least = min((x.dtype for x in tensors), key=lambda dtype: dtype.itemsize)
    return [x.to(least) for x in tensors]


def _counted(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Return a tensor of the form that `bincount` gives."""
    return x.new_empty(minlength) if weights is None else weights.new_empty(minlength)


def step_volume(model: nn.Module, mesh: ProcessGrid, given: Mapping[str, object]) -> Volume:
    """Bytes that a rank receives in forward and backward of a model that was split as a whole.

    Args:
        given: what the model is called with; of tensors, sizes and dtypes alone matter.

    Raises:
        LayoutError: it gives nothing that has a gradient.
    """
    shadow, dry = shadow_of(model, mesh, leave=vars(model).get("ndtp_report"))
    bare = {
        name: x.detach().to("meta").requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x
        for name, x in given.items()
    }
    with ExitStack() as ending:
        ending.enter_context(kept_beside(model))
        for each in (
            random_kept(),
            torch.enable_grad(),
            warnings.catch_warnings(),
            OfWholeBatches(),
            forms_of_results(),
        ):
            ending.enter_context(each)
        warnings.simplefilter("ignore", UserWarning)  # of what is gathered: the step itself says so
        try:
            out = shadow(**bare)
        except NotImplementedError as error:
            raise LayoutError(
                "report.volume: the model's code asks for numbers, which a run without memory does not have "
                f"({str(error).splitlines()[0][:80]})\n  fix: measure a step with ndtp.CommMeter"
            ) from error
        end = end_of_step(out)
        if end is None:
            raise LayoutError(
                "report.volume: the model gives nothing that has a gradient\n  fix: name its inputs, labels among them"
            )
        end.backward()
    volume: Volume = dry.volume
    return volume


def end_of_step(out: object) -> Tensor | None:
    """Return the tensor where backward begins: the loss, or the first result of a model that has none."""
    found = list(out.values()) if isinstance(out, Mapping) else list(out) if isinstance(out, (tuple, list)) else [out]
    wanted = [x for x in found if isinstance(x, Tensor) and x.requires_grad]
    if not wanted:
        return None
    first = wanted[0]
    if isinstance(first, SplitTensor):
        return bare(first).sum()
    return (leave(first) if isinstance(first, Hidden) else first).sum()


def usual_inputs(model: nn.Module, batch: int | None, sequence: int | None, target: int | None) -> dict[str, Tensor]:
    """Return the inputs that a stock model is trained with, without memory: ids or images, and labels.

    Raises:
        LayoutError: a length is missing, or the model takes something else.
    """
    main, config = getattr(model, "main_input_name", "input_ids"), getattr(model, "config", None)
    ids = lambda *shape: torch.empty(shape, dtype=torch.long, device="meta")  # noqa: E731
    if batch is None:
        raise LayoutError("report.volume: a whole model takes volume(batch, sequence), or its inputs by name")
    if config is None:
        first = next(iter(inspect.signature(model.forward).parameters), "x")
        raise LayoutError(
            f"report.volume: {type(model).__name__} has no config that tells what it takes\n"
            f"  fix: volume({first}=torch.empty(.., device='meta')), its inputs by name"
        )
    if main == IMAGES and isinstance(getattr(config, "image_size", None), (int, tuple, list)):
        size = config.image_size
        sides = (size, size) if isinstance(size, int) else tuple(size)
        dtype = next(model.parameters()).dtype
        pixels = torch.empty(batch, getattr(config, "num_channels", 3), *sides, dtype=dtype, device="meta")
        return {IMAGES: pixels} | _labels(model, batch, None, ids)
    if main != "input_ids":
        raise LayoutError(
            f"report.volume: {type(model).__name__} takes {main}, whose sizes its config does not tell\n"
            f"  fix: volume({main}=torch.empty(.., device='meta'), labels=..)"
        )
    if sequence is None:
        raise LayoutError("report.volume: a whole model takes volume(batch, sequence)")
    is_pair = getattr(config, "is_encoder_decoder", False)
    return {main: ids(batch, sequence)} | _labels(model, batch, (is_pair and target) or sequence, ids)


def _labels(model: object, batch: int, length: int | None, ids: Any) -> dict[str, Tensor]:
    """Return labels by the name of the model's class: a place in the text, a class of each token, or a class of the
    whole.
    """
    kind: Any = next(each for each in type(model).__mro__ if each.__module__.startswith("transformers."))
    task, takes = kind.__name__.partition("For")[2], inspect.signature(kind.forward).parameters
    if {"start_positions", "end_positions"} <= takes.keys():
        return {name: ids(batch) for name in ("start_positions", "end_positions")}
    if "labels" not in takes:
        return {}
    is_of_whole = task.endswith("Classification") and "Token" not in task
    return {"labels": ids(batch) if is_of_whole or length is None else ids(batch, length)}
