"""The steps of a program, the same code for either side; what they record is compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from program import Step
from sides import Dense, copied
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

RATE = 0.05


def perform(side: Dense, step: Step, index: int) -> None:
    STEPS[step.kind](side, step, f"{index} {step.kind}")


# ---------------------------------------------------------------------------------------------------------- training


def train(side: Dense, step: Step, label: str) -> None:
    """Micro-batches forward and backward; records outputs, gradients and what hooks saw."""
    how, model = _possible(side, step), side.models[step.model]
    if "keep" not in how:
        model.zero_grad(set_to_none="to zero" not in how)
    micros = step.micros if "accumulate" in how else 1
    reduce = "reduce" in how or bool(how & {"grad", "grad of input", "inputs"})
    # A checkpoint of the whole model would find other nodes when it computes again.
    with side.quiet("checkpoint" in how), _parameter_hooks(side, model, how, label, micros):
        for micro in range(micros):
            last = micro == micros - 1
            held = micros > 1 and (not last or "reduce" in how)
            seed = step.seed + 100 * micro
            where = f"{label} micro {micro}"
            if "outside" in how:
                graphs = _forward(side, model, how, seed, where)
                with side.accumulate() if held else contextlib.nullcontext():
                    _backward(side, model, how if last else how - {"grad"}, graphs, where)
            else:
                with side.accumulate() if held else contextlib.nullcontext():
                    graphs = _forward(side, model, how, seed, where)
                    # Inside `accumulate` the gradient of a weight is not to be had.
                    _backward(side, model, how - {"grad"} if held else how, graphs, where)
            for i, (x, _) in enumerate(graphs):
                side.record(f"{where} gradient of input {i}", x.grad, side.start)
        if micros > 1 and reduce:
            side.reduce()
    for name, parameter in model.named_parameters():
        side.record_gradient(f"{label} gradient of {name}", name, parameter.grad)


def _possible(side: Dense, step: Step) -> set[str]:
    """The flags without those that torch itself refuses together."""
    how, kinds = set(step.how), {unit.checkpoint for unit in side.program.units}
    if any(unit.compiled for unit in side.program.units):
        how -= {"twice", "grad of input"}  # a retained graph
    if kinds - {""}:
        how.discard("checkpoint")
    if "reentrant" in kinds:
        how -= {"grad", "grad of input", "inputs"}
    return how


def _forward(side: Dense, model: nn.Module, how: set[str], seed: int, label: str) -> list[tuple[Tensor, Tensor | None]]:
    """Inputs and their losses; None for a loss without a gradient."""
    graphs: list[tuple[Tensor, Tensor | None]] = []
    for i in range(2 if how & {"two", "reversed"} else 1):
        x = side.cut(side.values(side.shape(), seed + i), side.start)
        x.requires_grad_("input grad" in how or "grad of input" in how)
        if "tensor hooks" in how and x.requires_grad:
            x.register_hook(lambda grad: grad * 0.5)
        y = checkpoint(model, x, use_reentrant=False) if "checkpoint" in how else model(x)
        if "tensor hooks" in how and y.requires_grad:
            y.register_hook(lambda grad: grad * 1.25)
        side.record(f"{label} output {i}", y, side.end)
        weights = [side.cut(side.values(side.shape(), seed + 10 + j), side.end) for j in (0, 1)]
        loss = (y * weights[0]).sum() + (y * y * weights[1]).sum()
        graphs.append((x, side.loss(loss) if loss.requires_grad else None))
    return graphs


def _backward(
    side: Dense, model: nn.Module, how: set[str], graphs: list[tuple[Tensor, Tensor | None]], label: str
) -> None:
    losses = [loss for _, loss in graphs if loss is not None]
    if not losses:
        return
    if "two" in how and "reversed" not in how:
        losses = [losses[0] + losses[1]]
    elif "reversed" in how:
        losses.reverse()
    wanted = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for i, loss in enumerate(losses):
        if "grad of input" in how:
            x = [x for x, of in graphs if of is loss] or [graphs[0][0]]
            (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
            side.record(f"{label} autograd.grad {i} of input", gradient, side.start)
        if "grad" in how and wanted:
            gradients = torch.autograd.grad(loss, [p for _, p in wanted], allow_unused=True)
            for (name, _), gradient in zip(wanted, gradients, strict=True):
                side.record_gradient(f"{label} autograd.grad {i} of {name}", name, gradient)
            continue
        if "twice" in how:
            loss.backward(retain_graph=True)
        if "inputs" in how and len(wanted) > 1:
            loss.backward(inputs=[p for _, p in wanted[::2]])
        else:
            loss.backward()


@contextlib.contextmanager
def _parameter_hooks(side: Dense, model: nn.Module, how: set[str], label: str, micros: int) -> Iterator[None]:
    """Hooks that scale gradients, and hooks that see them when they are in `.grad`."""
    handles, seen, after = [], {}, {}
    wanted = [(name, p) for name, p in model.named_parameters() if p.requires_grad]

    def scale(name: str) -> Callable[[Tensor], Tensor]:
        def hook(grad: Tensor | None) -> Tensor | None:
            if grad is None:  # as it should never be
                return None
            seen[name] = grad.detach().clone() if seen.get(name) is None else seen[name] + grad.detach()
            return grad * 0.5

        return hook

    def look(name: str) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            after[name] = None if parameter.grad is None else parameter.grad.detach().clone()

        return hook

    @torch.no_grad()
    def step(parameter: Tensor) -> None:
        parameter.add_(parameter.grad, alpha=-RATE)
        parameter.grad = None

    uses = side.program.uses
    steps = "step in backward" in how and micros == 1 and len(set(uses)) == len(uses) and not how & {
        "two", "reversed", "twice", "checkpoint", "post hooks", "grad of input"
    } and not any(unit.checkpoint for unit in side.program.units) and side.program.family == "stack"  # fmt: skip
    for name, parameter in wanted:
        if "hooks" in how:
            seen[name] = None
            handles.append(parameter.register_hook(scale(name)))
        if "post hooks" in how:
            after[name] = None
            handles.append(parameter.register_post_accumulate_grad_hook(look(name)))
        if steps:
            handles.append(parameter.register_post_accumulate_grad_hook(step))
    yield
    for handle in handles:
        handle.remove()
    for name in seen:
        side.record_gradient(f"{label} seen by the hook of {name}", name, seen[name])
    for name in after:
        side.record_gradient(f"{label} seen by the later hook of {name}", name, after[name])
    if steps:
        record_values(side, label)


def is_all_sharded(side: Dense) -> bool:
    """Whether all parameters are DTensors of one grid, as torch's multi-tensor functions want them."""
    program = side.program
    return program.family == "stack" and len({unit.grid for unit in program.units}) == 1 and not any(
        unit.kind in ("matmul", "batch") for unit in program.units
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- updates


def record_values(side: Dense, label: str) -> None:
    for which, model in side.models.items():
        for name, parameter in model.named_parameters():
            side.record_gradient(f"{label} value of {which} {name}", name, parameter)


def optimizer(side: Dense, step: Step, label: str) -> None:
    """A step of an optimizer, by the gradients of a small training step."""
    model, how = side.models[step.model], set(step.how)
    model.zero_grad()
    train(side, Step("train", step.seed, step.model), label)
    side.sum_plain(model)
    parameters = [p for p in model.parameters() if p.grad is not None]
    if not parameters:
        return
    multi = is_all_sharded(side)
    if "clip" in how and multi:
        import ndtp

        norm = ndtp.nn.clip_grad_norm_(parameters, 0.5)
        side.record(f"{label} norm", norm)
    options: dict[str, Any] = {}
    if multi and "fused" in how and "adamw" in how:  # DTensor has no fused SGD
        options["fused"] = True
    elif multi and "foreach" in how:
        options["foreach"] = True
    if "adamw" in how:
        optimizer: Any = torch.optim.AdamW(parameters, lr=RATE, eps=0.1, **options)
    else:
        optimizer = torch.optim.SGD(parameters, lr=RATE, momentum=0.9, **options)
    optimizer.step()
    model.zero_grad()
    record_values(side, label)


def _both(side: Dense, step: Step) -> tuple[nn.Module, nn.Module]:
    names = ("online", "target") if "backwards" in step.how else ("target", "online")
    return side.models[names[0]], side.models[names[1]]


@torch.no_grad()
def ema(side: Dense, step: Step, label: str) -> None:
    theirs, ours = _both(side, step)
    pairs = list(zip(theirs.parameters(), ours.parameters(), strict=True))
    if "foreach" in step.how and is_all_sharded(side):
        torch._foreach_lerp_([old for old, _ in pairs], [new for _, new in pairs], 0.5)
        return
    for old, new in pairs:
        old.lerp_(new, 0.5)


@torch.no_grad()
def copy(side: Dense, step: Step, label: str) -> None:
    model = side.models[step.model]
    for i, (name, parameter) in enumerate(model.named_parameters()):
        if (step.seed >> (i % 12)) % 2:
            whole = side.values(side.real_shape(step.model, name), step.seed + i) * 0.3
            parameter.copy_(side.as_parameter(name, parameter, whole))


@torch.no_grad()
def mul(side: Dense, step: Step, label: str) -> None:
    for i, parameter in enumerate(side.models[step.model].parameters()):
        if (step.seed >> (i % 12)) % 2:
            parameter.mul_(-0.8)


def load(side: Dense, step: Step, label: str) -> None:
    """Another model's state; with "assign" the two share their tensors from then on.  Or whole dense tensors."""
    theirs, ours = _both(side, step)
    if "dense" in step.how and not getattr(theirs, "plain", {}):
        shapes = {name: side.real_shape(step.model, name) for name, _ in theirs.named_parameters()}
        state = {name: side.values(shape, step.seed + i) * 0.3 for i, (name, shape) in enumerate(shapes.items())}
        theirs.load_state_dict(state, assign="assign" in step.how)
        return
    theirs.load_state_dict(ours.state_dict(), assign="assign" in step.how)


def swap(side: Dense, step: Step, label: str) -> None:
    """Parameters change places between the two models."""
    online, target = side.models.values()
    for i, name in enumerate([name for name, _ in online.named_parameters()]):
        if (step.seed >> (i % 12)) % 2:
            _exchange(online, name, target, name)


def tie(side: Dense, step: Step, label: str) -> None:
    """A parameter of one unit is that of another unit of the same kind, too."""
    model = side.models[step.model]
    units = side.program.units
    alike = [(i, j) for i in range(len(units)) for j in range(i) if units[i] == units[j]]
    if side.program.family != "stack" or not alike:
        return
    i, j = alike[step.seed % len(alike)]
    names = [name for name, _ in model.units[j].named_parameters()]  # type: ignore[index]
    if names:
        name = names[step.seed % len(names)]
        parent, _, leaf = f"units.{i}.{name}".rpartition(".")
        setattr(model.get_submodule(parent), leaf, model.get_parameter(f"units.{j}.{name}"))


def _exchange(one: nn.Module, first: str, other: nn.Module, second: str) -> None:
    values = one.get_parameter(first), other.get_parameter(second)
    for model, name, value in ((one, first, values[1]), (other, second, values[0])):
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, value)


def deepcopy(side: Dense, step: Step, label: str) -> None:
    old, new = ("target", "online") if "backwards" in step.how else ("online", "target")
    side.models[new] = copied(side.models[old])
    side.models[new].zero_grad()  # of a DTensor torch copies the gradient, of a plain parameter it does not


def to(side: Dense, step: Step, label: str) -> None:
    side.move(torch.float32 if "float32" in step.how else torch.float64)
    for model in side.models.values():
        for parameter in model.parameters():
            # Torch forgets that hooks of a moved DTensor are to be called, unless it finds none at all.
            for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                if not getattr(parameter, hooks):
                    setattr(parameter, hooks, None)


def freeze(side: Dense, step: Step, label: str) -> None:
    for i, parameter in enumerate(side.models[step.model].parameters()):
        if (step.seed >> (i % 12)) % 4 == 0:
            parameter.requires_grad_(not parameter.requires_grad)


# ---------------------------------------------------------------------------------------------------------- others


def evaluate(side: Dense, step: Step, label: str) -> None:
    with torch.inference_mode() if "inference" in step.how else torch.no_grad():
        for i in range(2):
            x = side.cut(side.values(side.shape(), step.seed + i), side.start)
            side.record(f"{label} output {i}", side.models[step.model](x), side.end)


def drop(side: Dense, step: Step, label: str) -> None:
    """A forward without a backward, whose graph goes when the rank's garbage goes."""
    graphs = _forward(side, side.models[step.model], {"input grad"}, step.seed, label)
    side.keep(*graphs)


def between(side: Dense, step: Step, label: str) -> None:
    """A weight is changed in place between forward and backward: an error where the weight is needed, or exact."""
    model = side.models[step.model]
    model.zero_grad()
    graphs = _forward(side, model, set(step.how), step.seed, label)
    weights = [p for name, p in model.named_parameters() if p.dim() > 1]
    if not weights or any(unit.checkpoint or unit.computed for unit in side.program.units):
        return  # a checkpoint computes with the new weight, in both
    weight = weights[step.seed % len(weights)]
    with torch.no_grad():
        if "foreach" in step.how and is_all_sharded(side):
            torch._foreach_mul_([weight], 0.5)
        else:
            weight.mul_(0.5)
    try:
        _backward(side, model, set(), graphs, label)
        side.record(f"{label} ends in", "gradients")
        for name, parameter in model.named_parameters():
            side.record_gradient(f"{label} gradient of {name}", name, parameter.grad)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        side.record(f"{label} ends in", "an error")
    side.discard()
    model.zero_grad()


def create_graph(side: Dense, step: Step, label: str) -> None:
    """Refused at the first backward; dense torch can do it."""
    model = side.models[step.model]
    model.zero_grad()
    if type(side) is Dense:
        return
    units = [side.program.units[use] for use in side.program.uses]
    if not any(unit.kind in ("mlp", "gated", "pair", "linear", "matmul", "sequential", "residual") for unit in units):
        return
    if any(unit.checkpoint for unit in units):
        return  # torch itself refuses some
    x = side.cut(side.values(side.shape(), step.seed), side.start).requires_grad_()
    loss = side.loss(model(x).sum())
    try:
        torch.autograd.grad(loss, x, create_graph=True)
    except RuntimeError as error:
        if "create_graph" not in str(error):
            raise
    else:
        side.record(f"{label} was not refused", "")
    side.discard()


def refused(side: Dense, step: Step, label: str) -> None:
    """An input of the wrong width, on every rank: an error, and nothing is left behind."""
    x = side.cut(side.values(side.shape(), step.seed), side.start)
    if side.program.units[side.program.uses[0]].kind not in ("mlp", "gated", "pair", "linear", "head", "sequential"):
        return
    try:
        side.models[step.model](torch.cat([x, x], -1))
    except (RuntimeError, ValueError):
        side.record(f"{label} ends in", "an error")
    else:
        side.record(f"{label} ends in", "an output")


def interrupted(side: Dense, step: Step, label: str) -> None:
    """An exception leaves `accumulate`, from within a backward or not: what follows is exact."""
    model, how = side.models[step.model], set(step.how)
    model.zero_grad()
    with contextlib.suppress(KeyError), side.accumulate():
        graphs = _forward(side, model, {"input grad"}, step.seed, label)
        if "in backward" in how:
            graphs[0][0].register_hook(_raises)
        _backward(side, model, set(), graphs, label)
        raise KeyError
    if "in backward" not in how and "reduce" in how:  # nothing was broken off: what is held is a gradient
        side.reduce()
        for name, parameter in model.named_parameters():
            side.record_gradient(f"{label} gradient of {name}", name, parameter.grad)
    side.discard()
    model.zero_grad()


def _raises(gradient: Tensor) -> None:
    raise KeyError


STEPS: dict[str, Callable[[Dense, Step, str], None]] = {
    "train": train,
    "optimizer": optimizer,
    "ema": ema,
    "copy": copy,
    "mul": mul,
    "load": load,
    "swap": swap,
    "tie": tie,
    "deepcopy": deepcopy,
    "to": to,
    "freeze": freeze,
    "eval": evaluate,
    "drop": drop,
    "between": between,
    "create graph": create_graph,
    "refused": refused,
    "interrupted": interrupted,
}
