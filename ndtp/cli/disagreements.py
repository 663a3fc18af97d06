"""The ways in which one rank may differ in a training loop: each kind changes one point of the loop.

Every kind must end as a `MismatchError` that names it on all ranks; what ranks may well have of their own must not.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ndtp
from ndtp.cli.odd_rank import VOCABULARY, Batch, Change, Disagreement, TrainingLoop, unchanged
from ndtp.errors import CheckpointError, MismatchError
from ndtp.runtime.process_grid import ProcessGrid

NOTHING = "nothing was raised"


def run_kind(
    counter: Any,
    sizes: Mapping[str, int],
    scheme: str,
    name: str,
    odd: int,
    check: bool | None,
    timeout: float,
) -> str:
    """Return the error that this rank raises where the rank `odd` does otherwise; runs on every rank."""
    kind = next(kind for kind in (*KINDS, *SILENT) if kind.name == name)
    mesh = ProcessGrid(ndtp.Grid(sizes), timeout=timeout)
    check = True if kind.thorough and check is None else check
    loop = TrainingLoop(kind, mesh, scheme, mesh.rank == odd, check, "dp" if kind.along_dp else "")
    try:
        loop.train() if kind.program is None else kind.program(loop)
    except (MismatchError, CheckpointError) as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        mesh.discard_gradients()
        torch.manual_seed(0)
        counter.advance()
    return NOTHING


# ---------------------------------------------------------------------------------------------------------- programs


def _sample(loop: TrainingLoop) -> None:
    """Tokens drawn from what the model says, by a generator that one rank has seeded otherwise."""
    model, ids = loop.model().eval(), loop.batch(0).ids[:, :4]
    draw = torch.Generator().manual_seed(loop.changed("sampling", 0))
    with torch.no_grad():
        for _ in range(4):
            logits = loop.logits(model, ids)
            logits = logits.gathered() if hasattr(logits, "gathered") else logits
            ids = torch.cat((ids, torch.multinomial(logits[:, -1].softmax(-1), 1, generator=draw)), 1)


def _load(loop: TrainingLoop) -> None:
    """A checkpoint for each of two steps, of which one rank loads the other one."""
    model, folders = loop.model(), [tempfile.mkdtemp(prefix="ndtp-chaos-")]
    dist.broadcast_object_list(mine := list(folders))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for step in range(2):
            loop.step(model, optimizer, list(model.parameters()), loop.batch(step), unchanged)
            ndtp.checkpoint.save(model, optimizer, f"{mine[0]}/{step}")
        ndtp.checkpoint.load(model, optimizer, f"{mine[0]}/{loop.changed('folder', 0)}")
    finally:
        dist.barrier()
        shutil.rmtree(folders[0])


def _load_state(loop: TrainingLoop) -> None:
    """A file of dense weights that each rank loads by itself."""
    model, draw = loop.model(), torch.Generator().manual_seed(loop.changed("file", 0))
    dense, drawn = loop.dense().state_dict(), dict[int, Tensor]()
    for x in dense.values():
        if x.data_ptr() not in drawn:  # tied weights are one
            drawn[x.data_ptr()] = torch.randn(x.shape, generator=draw)
    model.load_state_dict({name: drawn[x.data_ptr()] for name, x in dense.items()})
    loop.step(model, torch.optim.SGD(model.parameters(), lr=0.1), list(model.parameters()), loop.batch(0), unchanged)


def _outside(loop: TrainingLoop) -> None:
    """A loss that code outside of the model makes of its logits."""
    model, batch = loop.model(), loop.batch(0)
    logits = loop.logits(model, batch.ids).flatten(0, 1)
    weight = loop.changed("weight", torch.ones(logits.shape[-1], dtype=logits.dtype))
    labels, smoothing = loop.changed("labels", batch.labels), loop.changed("smoothing", 0.0)
    F.cross_entropy(logits, labels.flatten(), weight=weight, label_smoothing=smoothing).backward()


def _average(loop: TrainingLoop) -> None:
    """An average of weights, which is evaluated after a step."""
    model, batch = loop.model(), loop.batch(0)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    loop.step(model, torch.optim.SGD(model.parameters(), lr=0.1), list(model.parameters()), batch, unchanged)
    for _ in range(loop.changed("updates", 1)):
        average.update_parameters(model)
    with torch.no_grad():
        loop.call(average, batch)


def _read(loop: TrainingLoop) -> None:
    """Norms of the layers' weights, in an order of one rank's own, before a call."""
    model, batch = loop.model(), loop.batch(0)
    weights = [loop.named(model).get_parameter(f"layers.0.{name}.weight") for name in ("up", "down")]
    for weight in loop.changed("order", weights):
        weight.norm()
    loop.call(model, batch)


def _in_threads(loop: TrainingLoop) -> None:
    """Another thread calls a second model while this one is in a call; what it raises is raised here."""
    models, batch, raised = [loop.model(), loop.model()], loop.batch(0), []

    def second() -> None:
        try:
            loop.call(models[1], batch)
        except MismatchError as error:
            raised.append(error)

    def inside(*_: object) -> None:
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()

    loop.named(models[0]).get_submodule("layers.0.act").register_forward_hook(inside)
    loop.call(models[0], batch)
    if raised:
        raise raised[0]


# ------------------------------------------------------------------------------------------------------------- kinds


def _to(value: object) -> Change:
    return lambda _: value


def _shorter(batch: Batch) -> Batch:
    given = (batch.ids, batch.labels, batch.mask, batch.positions)
    return Batch(*(None if x is None else x[:, : x.shape[1] // 2] for x in given))  # type: ignore[arg-type]


def _masked(mask: Tensor) -> Tensor:
    mask[-1, -1] = -10.0
    return mask


def _of_optimizer(**more: object) -> Mapping[str, Change]:
    return {"optimizer": lambda found: (found[0], {**found[1], **more})}


def _freeze(model: nn.Module) -> None:
    model.get_parameter("head.weight").requires_grad_(False)


def _exchange(model: nn.Module) -> None:
    layers: Any = model.get_submodule("layers")
    layers[0], layers[1] = layers[1], layers[0]


def _scaled(name: str, raw: bool) -> Change:
    def change(model: nn.Module) -> None:
        x = model.get_parameter(name)
        (x.to_local().data if raw and hasattr(x, "to_local") else x).mul_(1.5)

    return change


def _without_one(parameters: list[nn.Parameter]) -> None:
    parameters[0].grad = None


def _to_probability(p: float) -> Change:
    def change(model: nn.Module) -> None:
        model.get_submodule("layers.0.drop").p = p  # type: ignore[assignment]

    return change


def _patch(model: nn.Module) -> None:
    model.get_submodule("layers.0.act").forward = lambda x: x * x  # type: ignore[method-assign]


def _hook(model: nn.Module) -> None:
    model.get_submodule("layers.0.act").register_forward_hook(lambda *_: None)


POINTS = "at different points: .*is at the"
KINDS = [
    Disagreement("input ids", "input ids: values", {"input ids": lambda x: (x + 1) % VOCABULARY}),
    Disagreement("labels", "input labels: values", {"input labels": lambda x: (x + 1) % VOCABULARY}),
    Disagreement("attention mask", "input mask: .* norm", {"input mask": _masked}),
    Disagreement("position ids", "input positions: values", {"input positions": lambda x: x + 1}),
    Disagreement("shape of inputs", r"input ids: .*\(\d+, \d+\) int64", {"batch": _shorter}),
    Disagreement("dtype of an input", "input positions: .*int32", {"input positions": lambda x: x.int()}),
    Disagreement("no attention mask", "input mask: ", {"input mask": _to(None)}),
    Disagreement("a flag", "input asks: .*True", {"input asks": _to(True)}),
    Disagreement("eval", "training: .*False", {"train": _to(False)}),
    Disagreement("a part in eval", "training of 'layers.0.drop'",
                 {"call": lambda model: model.get_submodule("layers.0.drop").eval()}, 0.5),
    Disagreement("no_grad", "grad mode: .*False", {"around": lambda _: torch.no_grad()}),
    Disagreement("inference_mode", "(grad|inference) mode: ", {"around": lambda _: torch.inference_mode()}),
    Disagreement("autocast", "autocast: .*bfloat16", {"around": lambda _: torch.autocast("cpu", torch.bfloat16)}),
    Disagreement("accumulate", "accumulating gradients: .*True", {"around": lambda mesh: mesh.accumulate()}),
    Disagreement("a frozen layer", "requires_grad of 'head.weight': .*False", {"split": _freeze}),
    Disagreement("a layer frozen later", "requires_grad of 'head.weight': .*False", {"call": _freeze}),
    Disagreement("a hook", "hooks of 'layers.0.act': ", {"split": _hook}),
    Disagreement("a patched forward", "code of ", {"split": _patch}),
    Disagreement("order of layers", "module of 'layers", {"split": _exchange}),
    Disagreement("learning rate", "optimizer of step 1: lr: .*0.2", _of_optimizer(lr=0.2)),
    Disagreement("momentum", "optimizer of step 1: momentum: .*0.9", _of_optimizer(momentum=0.9)),
    Disagreement("optimizer", "optimizer of step 1: .*Adam", {"optimizer": lambda found: (torch.optim.Adam, found[1])}),
    Disagreement("weights of the optimizer", "optimizer of step 1: weights", {"parameters": lambda found: found[1:]}),
    Disagreement("another weight of the optimizer", "optimizer of step 1: weights",
                 {"parameters": lambda found: [nn.Parameter(torch.zeros(1)), *found[1:]]}),
    Disagreement("loss scale", "factor of the loss", {"loss": lambda loss: loss * 8}),
    Disagreement("clip", "factor of gradients", {"gradients": _to(0.1)}),
    Disagreement("a skipped zero_grad", "gradient of '.*' when it was called", {"zero": _to("keep")}),
    Disagreement("zero_grad to zeros", "gradient of '.*' when it was called", {"zero": _to("zeros")}),
    Disagreement("a skipped step", f"{POINTS}|input ids: values", {"skips": _to(True)}),
    Disagreement("a skipped backward", f"{POINTS} .*call 3", {"backward": _to(False)}),
    Disagreement("a skipped optimizer step", "optimizer steps so far", {"steps": _to(0)}),
    Disagreement("an optimizer step done twice", "optimizer steps so far", {"steps": _to(2)}),
    Disagreement("a call of its own", f"{POINTS} .*call 3", {"again": _to(True)}),
    Disagreement("a weight changed through .data", "weight 'head.weight'", {"end": _scaled("head.weight", True)}, at=0),
    Disagreement("a shard changed through .data", "weight 'layers.0.up.weight' since the last step: .*changed",
                 {"end": _scaled("layers.0.up.weight", True)}, at=0),
    Disagreement("a shard changed after step 2", "weight 'layers.0.up.weight' since the last step: .*changed",
                 {"end": _scaled("layers.0.up.weight", True)}, thorough=True),
    Disagreement("a weight written to", "weight 'layers.0.up.weight'", {"end": _scaled("layers.0.up.weight", False)}),
    Disagreement("dropout's seed", "random numbers of torch", {"call": lambda _: torch.manual_seed(1)}, 0.5),
    Disagreement("numbers drawn", "random numbers of torch", {"call": lambda _: torch.rand(1)}, 0.5),
    Disagreement("dropout's probability", "number p of 'layers.0.drop'", {"call": _to_probability(0.1)}, 0.5),
    Disagreement("noise in an input", "input mask: .* norm", {"input mask": lambda x: x * 1.004}),
    Disagreement("a gradient removed", "changed gradient of 'tokens.weight'.* none", {"clip": _without_one}),
    Disagreement("clip by value", "changed gradient of", {"clip": lambda all_: nn.utils.clip_grad_value_(all_, 1e-4)}),
    Disagreement("initial seed", "of 'tokens.weight'", {"seed": _to(1)}),
    Disagreement("scheme", "scheme|split|layout", {"scheme": lambda scheme: "1d" if scheme != "1d" else "1d-sp"}),
    Disagreement("sampling", "input ids: values", {"sampling": _to(1)}, program=_sample),
    Disagreement("a folder that is loaded", "ranks find different checkpoints", {"folder": _to(1)}, program=_load),
    Disagreement("a file that is loaded", "weight '.*' as it was loaded", {"file": _to(1)}, program=_load_state),
    Disagreement("labels outside", "input of the loss outside.*: values", {"labels": lambda x: x + 1 & 31},
                 program=_outside),
    Disagreement("class weights outside", "input of the loss outside.* norm", {"weight": lambda x: x * 2},
                 program=_outside),
    Disagreement("label smoothing outside", "input of the loss outside.*0.1", {"smoothing": _to(0.1)},
                 program=_outside),
    Disagreement("an average of weights", "weight '.*' since .*written to", {"updates": _to(2)}, program=_average),
    Disagreement("order of reads", "read 1 of split tensors", {"order": lambda found: found[::-1]}, program=_read),
    Disagreement("two threads", r"two threads .* call 1 of \w+", program=_in_threads),
]  # fmt: skip
# What is no disagreement: ranks of another `dp` have sequences of their own; numbers that no dropout uses are free.
SILENT = [
    Disagreement("nothing", ""),
    Disagreement("other rows along dp", "", along_dp=True),
    Disagreement("numbers drawn without dropout", "", {"call": lambda _: torch.rand(1)}),
]
