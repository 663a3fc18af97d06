"""The two sides of a `Language` program with what a user holds of each, and what is done with them."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from language import Language
from language_loop import Loop, Wrong, batch_of
from language_models import call, language_model, name_in
from torch import Tensor, nn

import ndtp
from ndtp.cli.odd_rank import Batch, unchanged

RATE = 0.05
TIED = ("tokens", "head")


class Side:
    """One of the two models, with all that a user may hold of it."""

    def __init__(self, program: Language) -> None:
        self.program, self.model = program, language_model(program)
        self.draws, self.seen, self.is_tied = 0, [], False
        self.kept: dict[str, Any] = {}
        self.optimizer = self._optimizer() if any("optimizer" in held for held in program.held) else None
        if "optimizer that has stepped" in program.held:
            self.step()
        self.hold()

    def _optimizer(self) -> torch.optim.Optimizer:
        parameters = list(self.model.parameters())
        if self.program.adamw:
            return torch.optim.AdamW(parameters, lr=RATE, eps=0.1)
        return torch.optim.SGD(parameters, lr=RATE, momentum=0.5)

    def hold(self) -> None:
        held, model = self.program.held, self.model
        self.kept["parameters"] = list(model.parameters())
        self.kept["names"] = [name for name, _ in model.named_parameters()]
        self.kept["modules"] = dict(model.named_modules())
        if "state" in held:
            self.kept["state"] = {key: value.clone() for key, value in model.state_dict().items()}
        first = self.kept["parameters"][-1]
        if "hook" in held:
            first.register_hook(lambda grad: grad * 0.5)
        if "later hook" in held:
            first.register_post_accumulate_grad_hook(lambda p: self.seen.append(self.whole(p.grad)))
        if "buffers" in held:
            self.kept["buffers"] = list(model.buffers())

    # ------------------------------------------------------------------------------------------------------- tensors

    def whole(self, x: Any) -> Tensor:
        return x.detach().clone()  # type: ignore[no-any-return]

    def random(self, *shape: int) -> Tensor:
        self.draws += 1
        draw = torch.Generator().manual_seed(self.program.seed + 1000 * self.draws)
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    def batch(self) -> Batch:
        self.draws += 1
        return batch_of(self.program, self.program.seed + 1000 * self.draws)

    def ids(self) -> Tensor:
        return self.batch().ids

    def call(self, model: nn.Module, ids: Tensor, labels: Tensor | None = None, **inputs: Any) -> Any:
        return call(self.program.family, model, ids, labels, **inputs)

    def real(self, p: Any) -> tuple[int, ...]:
        return tuple(getattr(p, "ndtp_real", p.shape))

    def by_name(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    # --------------------------------------------------------------------------------------------------------- steps

    def step(self) -> None:
        if self.optimizer is None:
            self.optimizer = self._optimizer()
        loop, parameters = Loop(self.program), list(self.model.parameters())
        loop.step(self.model, self.optimizer, parameters, self.batch(), unchanged)


class Split(Side):
    """On the grid."""

    def __init__(self, program: Language) -> None:
        super().__init__(program)
        # Without a timeout of its own, whose process groups would be its own: programs share those of a grid.
        self.mesh = ndtp.ProcessGrid(ndtp.Grid(dict(program.grid)))
        check = True if program.is_thorough else None
        ndtp.parallelize(self.model, self.mesh, scheme=program.scheme, check=check)
        self.look()

    def look(self) -> None:
        """Is all that was held what it was?"""
        parameters, modules = list(self.model.parameters()), dict(self.model.named_modules())
        if [id(p) for p in parameters] != [id(p) for p in self.kept["parameters"]]:
            raise Wrong("a parameter that was held is another object now")
        if any(modules.get(name) is not module for name, module in self.kept["modules"].items()):
            raise Wrong("a module that was held is another object now")
        if [name for name, _ in self.model.named_parameters()] != self.kept["names"]:
            raise Wrong("parameters have other names now")

    def whole(self, x: Any) -> Tensor:
        x = x.detach()
        if hasattr(x, "full_tensor"):
            return x.full_tensor().detach().clone()  # type: ignore[no-any-return]
        return x.gathered().detach().clone() if hasattr(x, "gathered") else x.clone()


# ------------------------------------------------------------------------------------------------------------- deeds


def _train(side: Side) -> Any:
    side.step()


def _eval(side: Side) -> Any:
    with torch.no_grad():
        batch = side.batch()
        logits = side.call(side.model.eval(), batch.ids, mask=batch.mask, positions=batch.positions)
        return side.whole(logits)


def _generate(side: Side) -> Any:
    model: Any = side.model.eval()
    ids = side.ids()
    if hasattr(model, "generate"):
        return model.generate(ids, max_new_tokens=3, do_sample=False, use_cache=True)
    with torch.no_grad():
        for _ in range(3):
            ids = torch.cat((ids, side.whole(side.call(model, ids))[:, -1:].argmax(-1)), 1)
    return ids


def _clip(side: Side) -> Any:
    ids = side.ids()
    side.call(side.model, ids, ids).backward()
    norm = torch.nn.utils.clip_grad_norm_(side.model.parameters(), 0.05)
    grads = {name: side.whole(p.grad) for name, p in side.by_name().items() if p.grad is not None}
    side.model.zero_grad()
    return {"norm": side.whole(norm), **grads}


def _log(side: Side) -> Any:
    """Numbers of weights, gradients, the state dict and what an optimizer keeps, as a log of training has them."""
    ids = side.ids()
    side.model.zero_grad()
    side.call(side.model, ids, ids).backward()
    seen = {name: x for name, x in side.model.state_dict().items() if x.is_floating_point()}
    for name, p in side.by_name().items():
        kept = {} if side.optimizer is None else side.optimizer.state.get(p, {})
        seen |= {f"{name} {key}": x for key, x in kept.items() if isinstance(x, Tensor)}
        if p.grad is not None:
            seen[f"{name} gradient"] = p.grad
    found = {name: torch.tensor([float(x.norm()), float(x.mean()), float(x.abs().max())]) for name, x in seen.items()}
    side.model.zero_grad()
    return found


@torch.no_grad()
def _ema(side: Side) -> Any:
    if "ema" not in side.kept:
        side.kept["ema"] = copy.deepcopy(side.model)
    ema = side.kept["ema"]
    torch._foreach_lerp_(list(ema.parameters()), list(side.model.parameters()), 0.5)
    return {name: side.whole(p) for name, p in ema.named_parameters()}


@torch.no_grad()
def _dense_ema(side: Side) -> Any:
    if "dense ema" not in side.kept:
        side.kept["dense ema"] = {name: side.whole(p) * 0.5 for name, p in side.by_name().items()}
    for name, p in side.by_name().items():
        side.kept["dense ema"][name].lerp_(p, 0.25)
    return {name: each.clone() for name, each in side.kept["dense ema"].items()}


@torch.no_grad()
def _copy(side: Side) -> Any:
    for i, p in enumerate(side.model.parameters()):
        whole = side.random(*side.real(p)) * 0.3
        if i % 2:
            p.copy_(whole)


@torch.no_grad()
def _fill(side: Side) -> Any:
    for i, p in enumerate(side.model.parameters()):
        p.mul_(0.9).add_(0.01) if i % 2 else p.clamp_(-1.0, 1.0)


def _init(side: Side) -> Any:
    torch.manual_seed(side.program.seed)
    for p in side.model.parameters():
        nn.init.normal_(p, std=0.2) if p.dim() > 1 else nn.init.uniform_(p, 0.1, 0.5)


def _apply(side: Side) -> Any:
    torch.manual_seed(side.program.seed)

    def reset(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.2)

    side.model.apply(reset)


def _load(side: Side) -> Any:
    state = {key: side.random(*side.real(value)) * 0.3 if value.is_floating_point() else value
             for key, value in side.model.state_dict(keep_vars=True).items()}  # fmt: skip
    if side.program.tied or side.is_tied:
        table, head = (name_in(side.program.family, f"{name}.weight") for name in TIED)
        state[head] = state[table]
    side.model.load_state_dict(state)


def _load_held(side: Side) -> Any:
    if "state" in side.kept:
        side.model.load_state_dict(side.kept["state"])


def _a_linear(side: Side) -> Any:
    found = [m for m in side.model.modules() if hasattr(m, "weight") and getattr(m.weight, "dim", int)() == 2]
    return found[side.draws % len(found)]


def _assign(side: Side) -> Any:
    layer = _a_linear(side)
    layer.weight = nn.Parameter(side.random(*side.real(layer.weight)) * 0.3)
    side.optimizer = None
    _forget(side)


def _tie(side: Side) -> Any:
    table, head = (side.model.get_submodule(name_in(side.program.family, name)) for name in TIED)
    head.weight = table.weight
    side.optimizer, side.is_tied = None, True
    _forget(side)


def _forget(side: Side) -> None:
    """Of parameters that are others by the user's own doing."""
    side.kept["parameters"] = list(side.model.parameters())
    side.kept["names"] = [name for name, _ in side.model.named_parameters()]
    side.kept["modules"] = dict(side.model.named_modules())


def _freeze(side: Side) -> Any:
    for i, p in enumerate(side.model.parameters()):
        if (side.program.seed >> (i % 8)) % 2:
            p.requires_grad_(not p.requires_grad)
    if not any(p.requires_grad for p in side.model.parameters()):
        next(iter(side.model.parameters())).requires_grad_(True)


def _deepcopy(side: Side) -> Any:
    other = copy.deepcopy(side.model)
    ids = side.ids()
    loss = side.call(other, ids, ids)
    loss.backward()
    return {"loss": side.whole(loss)} | {
        name: side.whole(p.grad) for name, p in other.named_parameters() if p.grad is not None
    }


def _pickle(side: Side) -> Any:
    torch.save(side.model, file := io.BytesIO())
    file.seek(0)
    other = torch.load(file, weights_only=False)
    with torch.no_grad():
        return side.whole(side.call(other.eval(), side.ids()))


def _penalty(side: Side) -> Any:
    ids = side.ids()
    side.model.zero_grad()
    loss = side.call(side.model, ids, ids) + 0.1 * sum(
        p.pow(2).sum() for p in side.model.parameters() if p.requires_grad
    )
    loss.backward()
    grads = {name: side.whole(p.grad) for name, p in side.by_name().items() if p.grad is not None}
    side.model.zero_grad()
    return {"loss": side.whole(loss), **grads}


def _to_dense(side: Side) -> Any:
    """The split model's weights in a dense model that is made anew."""
    other = language_model(side.program, 1)
    state = {key: side.whole(value) for key, value in side.model.state_dict(keep_vars=True).items()}
    other.load_state_dict(state)
    with torch.no_grad():
        return side.call(other, side.ids())


@torch.no_grad()
def _swap(side: Side) -> Any:
    """Through `.data`, as older code does."""
    for p in list(side.model.parameters())[::2]:
        p.data.mul_(0.7)


@torch.no_grad()
def _exchange(side: Side) -> Any:
    """Values of two parameters of one shape change places."""
    by_shape: dict[tuple[int, ...], list[Any]] = {}
    for p in side.model.parameters():
        by_shape.setdefault(side.real(p), []).append(p)
    for one, other in (pair[:2] for pair in by_shape.values() if len(pair) > 1):
        kept = side.whole(one)
        one.copy_(side.whole(other))
        other.copy_(kept)


DEEDS: dict[str, Callable[[Side], Any]] = {
    "train": _train, "eval": _eval, "generate": _generate, "clip": _clip, "log": _log, "ema": _ema,
    "dense ema": _dense_ema, "copy": _copy, "fill": _fill, "init": _init, "apply": _apply, "load": _load,
    "load what was held": _load_held, "assign": _assign, "tie": _tie, "freeze": _freeze, "deepcopy": _deepcopy,
    "pickle": _pickle, "penalty": _penalty, "to dense": _to_dense, "swap": _swap, "exchange": _exchange,
}  # fmt: skip
