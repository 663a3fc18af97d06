"""`nn.MultiheadAttention` as a model's own code: projections that are layers as any other, and products between.

torch keeps the weights of queries, keys and values in one parameter, and reads those of `out_proj` past the layer.  An
opened attention calls a layer for each input instead; its parameters, their names and its results stay.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ndtp.models.adopted import class_of
from ndtp.models.computed import is_computed
from ndtp.models.roles import is_of_own_class
from ndtp.split.multihead import attended

INPUTS = "qkv"  # of which an attention has projections
SEPARATE = tuple(f"{each}_proj_weight" for each in INPUTS)


class PartOfWeight(nn.Linear):
    """A Linear whose weight and bias are rows of another module's parameters; see `projection`.

    Attributes:
        owner: that module.
        keys: the names of the parameters there, of "weight" and "bias".
        rows: of the bias, and of a weight that several parts share.
    """

    owner: Any
    keys: dict[str, str]
    rows: range
    is_called = True

    @property
    def weight(self) -> Any:  # type: ignore[override]
        return self._rows("weight")

    @property
    def bias(self) -> Any:  # type: ignore[override]
        return self._rows("bias")

    def _rows(self, name: str) -> Tensor | None:
        p = getattr(self.owner, self.keys[name])
        return p if p is None or len(p) == len(self.rows) else p[self.rows.start : self.rows.stop]


def projection(owner: nn.MultiheadAttention, inputs: str) -> PartOfWeight:
    """The Linear that gives the projections of `inputs`, consecutive letters of "qkv", one behind the other."""
    made = PartOfWeight.__new__(PartOfWeight)
    nn.Module.__init__(made)
    first, size = INPUTS.index(inputs[0]), owner.embed_dim
    key = "in_proj_weight" if owner.in_proj_weight is not None else SEPARATE[first]
    rows = range(first * size, (first + len(inputs)) * size)
    vars(made).update(owner=owner, keys={"weight": key, "bias": "in_proj_bias"}, rows=rows)
    made.in_features, made.out_features = getattr(owner, key).shape[1], len(rows)
    return made


class Opened(nn.Module):
    """The class of an attention that calls its projections.

    Attributes:
        parts: layers, and the inputs of which each gives the projections.
    """

    parts: list[tuple[str, nn.Module]]
    embed_dim: int
    num_heads: int
    dropout: float
    batch_first: bool
    add_zero_attn: bool
    out_proj: nn.Module
    bias_k: Tensor | None
    bias_v: Tensor | None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        is_batched = query.dim() == 3
        if not is_batched:
            query, key, value = _batches_of_one(query, key, value, int(not self.batch_first))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        q, k, v = self._projected({"q": query, "k": key, "v": value})
        y, weights = attended(
            q, k, v, self.num_heads, batch_first=self.batch_first, mask=attn_mask, padding=key_padding_mask,
            dropout=self.dropout if self.training else 0.0, weights=need_weights, averages=average_attn_weights,
            is_causal=is_causal, more=(self.bias_k, self.bias_v), zeros=self.add_zero_attn,
            name=getattr(self, "name", "attention"),
        )  # fmt: skip
        y = self.out_proj(y)
        if is_batched:
            return y, weights
        return y.squeeze(int(not self.batch_first)), None if weights is None else weights[0]

    def _projected(self, given: dict[str, Tensor]) -> list[Tensor]:
        found: dict[str, Tensor] = {}
        for inputs, layer in self.parts:
            for x in {id(given[each]): given[each] for each in inputs}.values():
                sections = layer(x).split(self.embed_dim, -1)
                found |= {each: y for each, y in zip(inputs, sections, strict=True) if given[each] is x}
        return [found[each] for each in INPUTS]


def _batches_of_one(query: Tensor, key: Tensor, value: Tensor, dim: int) -> list[Tensor]:
    """Return single sequences as batches; what was one tensor stays one."""
    made = {id(x): x.unsqueeze(dim) for x in (query, key, value)}
    return [made[id(x)] for x in (query, key, value)]


def can_open(module: nn.Module) -> bool:
    """Return whether a module is torch's attention as it is, with parameters as they are."""
    if not isinstance(module, nn.MultiheadAttention) or type(module).forward is not nn.MultiheadAttention.forward:
        return False
    own = [p for p in (*module._parameters.values(), *module.out_proj._parameters.values()) if p is not None]
    return not any(is_computed(m) for m in (module, module.out_proj)) and not any(map(is_of_own_class, own))


def leave_fast_path(module: nn.Module) -> None:
    """Make torch's encoder call its layers: its fast path for inference reads their weights instead."""
    if isinstance(module, nn.TransformerEncoderLayer):
        module.activation_relu_or_gelu = 0  # "an activation that the fast path does not have"
    elif isinstance(module, nn.TransformerEncoder):
        module.use_nested_tensor = False


def open_to_see(model: nn.Module) -> None:
    """Open the attentions of a copy of a model, which a run of it is to show: each projection is a layer by itself."""
    for module in model.modules():
        leave_fast_path(module)
    attentions: list[Any] = [module for module in model.modules() if can_open(module)]
    for module in attentions:
        module.parts = [(each, projection(module, each)) for each in INPUTS]
        for each, layer in module.parts:
            module.add_module(name_of(each), layer)
        module.__class__ = class_of(Opened, type(module))
        module.out_proj.is_called = True


def name_of(inputs: str) -> str:
    return "in_proj" if inputs == INPUTS else f"in_proj_{inputs}"
