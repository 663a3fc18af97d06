"""The cut of a model of transformers into stages, found by running two tokens through it.

Nothing is known of architectures.  The layers are the list of modules as long as the config says; one run tells what
comes before them, what behind, and whether one tensor of hidden states is all that passes from one to the next.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ndtp.compute.torch_calls import Arguments, Keywords
from ndtp.errors import LayoutError
from ndtp.pipelines.balance import Balance, balance_of
from ndtp.pipelines.without_numbers import runnable


@dataclass
class Anatomy:
    """The parts of a dense causal language model.

    Attributes:
        layers: names, in order.
        front, back: names of modules with parameters of their own that run before the layers, and behind them.
        in_tuples: whether a layer gives its hidden states as the first of a tuple; of how many.
        shared: parameters that something in front and something at the back share: (name, name).
        balance: the loss of the routers of all layers, if the model adds one to its own.
    """

    layers: list[str]
    front: list[str]
    back: list[str]
    in_tuples: int = 0
    shared: list[tuple[str, str]] = field(default_factory=list)
    balance: Balance | None = None


def anatomy_of(model: nn.Module) -> Anatomy:
    """Find it out.

    Raises:
        LayoutError: a model that cannot be cut between its layers, and why.
    """
    layers = _layers(model)
    trial = _Trial(model, layers)
    trial.run()
    owners = {n: m for n, m in model.named_modules() if any(p is not None for p in m._parameters.values())}
    outside = [n for n in owners if not any(n == layer or n.startswith(f"{layer}.") for layer in layers)]
    unused = [name for name in outside if name not in trial.order]
    if unused:
        raise LayoutError(f"pipeline: {', '.join(unused)} took no part in a run of the model; no stage would have it")
    front = [name for name in outside if trial.order[name] == 0]
    back = [name for name in outside if trial.order[name] == len(layers)]
    between = set(outside) - {*front, *back}
    if between:
        raise LayoutError(f"pipeline: {', '.join(sorted(between))} runs between layers; the model cannot be cut there")
    found = Anatomy(layers, front, back, trial.in_tuples, balance=balance_of(model) if trial.has_balance else None)
    known = {id(p): f"{name}.{key}" for name in front for key, p in owners[name]._parameters.items() if p is not None}
    for name in back:
        for key, p in owners[name]._parameters.items():
            if id(p) in known:
                found.shared.append((known[id(p)], f"{name}.{key}"))
    return found


def _layers(model: nn.Module) -> list[str]:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    count = next((n for k in ("num_hidden_layers", "n_layer", "num_layers") if (n := getattr(text, k, None))), None)
    lists = [name for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if len(lists) != 1:
        raise LayoutError(
            f"pipeline: {type(model).__name__} has {len(lists)} lists of {count} layers, as many as its config says; "
            "stages are cut between the layers of one"
        )
    return [f"{lists[0]}.{i}" for i in range(count)]  # type: ignore[arg-type]


class _Trial:
    """A run of the dense model, looked at from outside.

    Attributes:
        order: names of modules with parameters -> how many layers had run when they first did.
        has_balance: whether there is a loss of routers beside that of labels.
    """

    def __init__(self, model: nn.Module, layers: Sequence[str]) -> None:
        self.model, self.layers = model, layers
        self.order: dict[str, int] = {}
        self.count, self.in_tuples, self.has_balance = 0, 0, False
        self.passed: Any = None

    def run(self) -> None:
        model, handles = self.model, []
        owners = [(n, m) for n, m in model.named_modules() if any(p is not None for p in m._parameters.values())]
        for name, module in owners:
            handles.append(module.register_forward_pre_hook(lambda *_, n=name: self._ran(n)))
        for name in self.layers:
            layer = model.get_submodule(name)
            handles.append(layer.register_forward_pre_hook(self._before, with_kwargs=True))
            handles.append(layer.register_forward_hook(self._behind))
        first = next(model.parameters())
        wanted = [(p, p.requires_grad) for p in model.parameters() if p.is_floating_point()]
        ids = torch.zeros(1, 2, dtype=torch.long, device=first.device)
        try:
            for p, _ in wanted:
                p.requires_grad_(True)
            with torch.random.fork_rng(), torch.enable_grad(), runnable(model):
                found = model(input_ids=ids, use_cache=False)
        finally:
            for p, before in wanted:
                p.requires_grad_(before)
            for handle in handles:
                handle.remove()
        self.has_balance = getattr(found, "aux_loss", None) is not None

    def _ran(self, name: str) -> None:
        self.order.setdefault(name, self.count)

    def _before(self, layer: nn.Module, args: Arguments, kwargs: Keywords) -> None:
        name, hidden = self.layers[self.count], args[0] if args else kwargs.get("hidden_states")
        if layer is not self.model.get_submodule(name):
            raise LayoutError(f"pipeline: {name} does not run in the order of the layers")
        if self.count and hidden is not self.passed:
            raise LayoutError(f"pipeline: {name} takes something else than what the layer before it gave")
        rest = [x for x in tree_leaves((args[1:], kwargs)) if isinstance(x, Tensor) and x is not hidden]
        if any(x.requires_grad for x in rest):
            raise LayoutError(
                f"pipeline: {name} takes more that depends on parameters than hidden states; only these pass from "
                "stage to stage"
            )

    def _behind(self, layer: nn.Module, args: Arguments, output: object) -> None:
        self.in_tuples = len(output) if isinstance(output, tuple) else 0
        self.passed = output[0] if isinstance(output, tuple) else output
        self.count += 1


class Arrived(Exception):
    """A signal that ends a stage's run of the model's code: the stage's results are there, the rest is for later
    stages.
    """


class Traveller:
    """Hidden states on their way through one stage's part of a model's code."""

    hidden: Any = None


class Elsewhere(nn.Module):
    """A module without parameters in place of a module that other stages have."""

    def __init__(self, name: str, traveller: Traveller) -> None:
        super().__init__()
        self.name = name
        self.traveller = traveller

    def extra_repr(self) -> str:
        return f"'{self.name}'"


class LayerElsewhere(Elsewhere):
    """A layer in place of one before this stage's own: it hands on the hidden states that have arrived.

    Attributes:
        in_tuples: as of `Anatomy`.
    """

    is_behind, in_tuples = False, 0

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_behind:
            self.traveller.hidden = hidden_states
            raise Arrived
        hidden = self.traveller.hidden
        return (hidden, *[None] * (self.in_tuples - 1)) if self.in_tuples else hidden


class TableElsewhere(Elsewhere):
    """An embedding that the first stage has: what it would give is dropped at the first layer; only its sizes count."""

    is_first = False

    def __init__(self, name: str, traveller: Traveller, table: nn.Embedding) -> None:
        super().__init__(name, traveller)
        self.features = table.embedding_dim

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        hidden = self.traveller.hidden
        if self.is_first:
            return hidden.detach()  # type: ignore[no-any-return]
        return torch.zeros(1, 1, self.features, dtype=hidden.dtype, device=hidden.device)  # added to it


def part_of_model(model: nn.Module, anatomy: Anatomy, layers: range, traveller: Traveller) -> nn.Module:
    """A model of the same code and names, with the parameters of these layers and of what stands at its ends alone.

    The parameters have the memory of those of `model`, and are others, which a grid may have.

    Raises:
        LayoutError: what stands in front of the layers cannot be left out.
    """
    is_first, is_last = layers.start == 0, layers.stop == len(anatomy.layers)
    own: Any = model
    memo = {id(x): x for x in (*model.buffers(), getattr(own, "config", None))}
    memo |= {id(p): _of_same_memory(p) for p in model.parameters()}
    embedding = own.get_input_embeddings()
    for i, name in enumerate(anatomy.layers):
        if i not in layers:
            stub = LayerElsewhere(name, traveller)
            stub.is_behind, stub.in_tuples = i >= layers.stop, anatomy.in_tuples
            memo[id(model.get_submodule(name))] = stub
    for name in () if is_first else anatomy.front:
        module = model.get_submodule(name)
        if isinstance(module, nn.Embedding):
            table = TableElsewhere(name, traveller, module)
            table.is_first = module is embedding
            memo[id(module)] = table
        elif "norm" in type(module).__name__.lower():
            memo[id(module)] = nn.Identity()
        else:
            raise LayoutError(f"pipeline: {name} ({type(module).__name__}) in front of the layers is left to no stage")
    for name in () if is_last else anatomy.back:
        memo[id(model.get_submodule(name))] = Elsewhere(name, traveller)
    return copy.deepcopy(model, memo)


def _of_same_memory(parameter: nn.Parameter) -> nn.Parameter:
    made = nn.Parameter(parameter.detach(), parameter.requires_grad)
    vars(made).update(vars(parameter))
    return made
