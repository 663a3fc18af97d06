"""Training steps, the same code for either side; what they record is compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from program import Step
from sides import Dense
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

RATE = 0.05


def train(side: Dense, step: Step, label: str) -> None:
    """Micro-batches forward and backward; records outputs, gradients and what hooks saw."""
    how, model = _possible(side, step), side.models[step.model]
    if "keep" not in how:
        model.zero_grad(set_to_none="to zero" not in how)
    micros = step.micros if "accumulate" in how else 1
    reduce = "reduce" in how or bool(how & {"grad", "grad of input", "inputs"})
    # A checkpoint of the whole model would find other nodes when it computes again.  Gradients of whole parameters that
    # hooks see are summed as they come: in autograd's order, which side graphs of one rank change.
    is_in_order = side.program.family == "model" and bool(how & {"hooks", "post hooks"})
    with side.quiet("checkpoint" in how or is_in_order), _parameter_hooks(side, model, how, label, micros):
        for micro in range(micros):
            last = micro == micros - 1
            held = micros > 1 and (not last or "reduce" in how)
            seed = step.seed + 100 * micro
            where = f"{label} micro {micro}"
            if "outside" in how:
                graphs = forward(side, model, how, seed, where)
                with side.accumulate() if held else contextlib.nullcontext():
                    backward(side, model, how if last else how - {"grad"}, graphs, where)
            else:
                with side.accumulate() if held else contextlib.nullcontext():
                    graphs = forward(side, model, how, seed, where)
                    # Inside `accumulate` the gradient of a weight is not to be had.
                    backward(side, model, how - {"grad"} if held else how, graphs, where)
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


def forward(side: Dense, model: nn.Module, how: set[str], seed: int, label: str) -> list[tuple[Tensor, Tensor | None]]:
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


def backward(
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


def record_values(side: Dense, label: str) -> None:
    for which, model in side.models.items():
        for name, parameter in model.named_parameters():
            side.record_gradient(f"{label} value of {which} {name}", name, parameter)
