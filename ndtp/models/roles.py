"""The roles of a transformer's modules, found by names, sizes and a trial: attention with projections, MLPs, norms.

A new architecture that names its layers as others do needs nothing here; one that does not, a word in a table.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from types import NoneType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from ndtp.errors import LayoutError
from ndtp.models.fused_order import heads_in_order
from ndtp.models.tried_linear import computes_linear
from ndtp.ops.norms import default_eps
from ndtp.runtime.arrival import is_plain

# Names of projections by their role in an attention module.
Q = ("q_proj", "query", "q", "q_lin", "to_q", "wq", "query_proj", "q_attn")
K = ("k_proj", "key", "k", "k_lin", "to_k", "wk", "key_proj")
V = ("v_proj", "value", "v", "v_lin", "to_v", "wv", "value_proj")
OUT = ("o_proj", "out_proj", "dense", "c_proj", "o", "out_lin", "to_out", "wo", "Wo", "proj")
FUSED = ("query_key_value", "qkv_proj", "c_attn", "qkv", "Wqkv")
# In which order a weight has q, k and v is in the code of an attention class alone: of another class it is left whole.
ORDERS = {  # see `ndtp.models.fused_order`
    **dict.fromkeys((
        "gpt_neox.GPTNeoXAttention", "gpt_neox_japanese.GPTNeoXJapaneseAttention", "bloom.BloomAttention",
        "persimmon.PersimmonAttention", "gpt_bigcode.GPTBigCodeAttention", "falcon.FalconAttention",
    ), "groups"),
    **dict.fromkeys((
        "gpt2.GPT2Attention", "phi3.Phi3Attention", "mpt.MptAttention", "modernbert.ModernBertAttention",
        "openai.Attention", "decision_transformer.DecisionTransformerGPT2Attention",
    ), "sections"),
    "codegen.CodeGenAttention": "quarters",
}  # fmt: skip
# Where the projection that leads back is in a module of its own, beside.
OUT_BESIDE = ("output.dense", "out_proj", "output.out_proj")
# In the names of attention whose keys and values are of other rows than its queries.
CROSS = ("cross", "encoder_attn", "encdec", "enc_dec", "encoder_decoder", "encoder_attention")
# In an MLP.
GATE = ("gate_proj", "wi_0", "w1", "gate")
UP = ("up_proj", "wi_1", "w3", "fc1", "c_fc", "dense_h_to_4h", "wi", "lin1", "fc_in", "linear1", "intermediate.dense")
BOTH = ("gate_up_proj", "Wi")
DOWN = ("down_proj", "wo", "Wo", "w2", "fc2", "c_proj", "dense_4h_to_h", "lin2", "fc_out", "linear2", "output.dense")
HEAD_DIMS = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "d_kv", "dim_head")
NUM_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")


@dataclass(frozen=True)
class AttentionRole:
    """Names, from the model down, and sizes of one attention module."""

    name: str
    inputs: dict[str, str]
    output: str
    inside: bool
    heads: int
    kv_heads: int
    head_dim: int
    order: str = ""


@dataclass(frozen=True)
class MLPRole:
    """Names of the layers of one MLP; the gate, if there is one, comes first in `ups`."""

    name: str
    ups: tuple[str, ...]
    down: str
    sections: tuple[int, ...] = ()


def is_of_own_class(p: nn.Parameter) -> bool:
    """Return whether a parameter is of integers or of a tensor class of somebody else's, as quantised ones are."""
    is_number = p.is_floating_point() or p.is_complex()
    return is_plain(p) and (type(p) not in (nn.Parameter, FakeTensor) or not is_number)


def is_linear(module: object, casts: bool = False) -> bool:
    """An `nn.Linear`, also of a class that computes the same, or transformers' Conv1D, with its weight as [in, out].

    Torch's own subclasses are none, whose weights are read past them, but for one whose `is_called` says otherwise.

    Args:
        casts: whether it may cast its weight to the dtype of its input, as a layer of a split tensor may.
    """
    if isinstance(module, nn.Linear):
        weight = module._parameters.get("weight")
        if weight is not None and is_of_own_class(weight):
            return False
        if getattr(module, "is_called", False):
            return True
        if type(module) is nn.Linear:
            return weight is not None  # without, code computes one for each call
        return computes_linear(module, casts)
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_wrapper(module: object) -> bool:
    """Return whether a module adds low-rank adapters to a layer, in peft's form."""
    own = module._modules if isinstance(module, nn.Module) else {}
    return "base_layer" in own and isinstance(own.get("lora_A"), nn.ModuleDict) and isinstance(
        own.get("lora_B"), nn.ModuleDict
    )  # fmt: skip


def linear_at(modules: dict[str, nn.Module], name: str, casts: bool) -> str:
    """The full name of the Linear that is called `name`, or wrapped in what is; empty if there is none."""
    if is_linear(modules.get(name), casts):
        return name
    module: Any = modules.get(name)
    return f"{name}.base_layer" if is_wrapper(module) and is_linear(module.base_layer, casts) else ""


def features(module: Any) -> tuple[int, int]:
    """Return a layer's numbers of features, (in, out)."""
    first, second = module.weight.shape
    return (first, second) if not isinstance(module, nn.Linear) else (second, first)


def hidden_size(model: object) -> int:
    """Features of a model's hidden states, by its config.

    Raises:
        LayoutError: it does not tell.
    """
    config: object = getattr(model, "config", None)
    try:
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
    except ValueError as error:  # it has several
        raise LayoutError(f"parallelize: {str(error).split('.')[0]}") from None
    for owner in (text, config):
        for name in ("hidden_size", "d_model", "n_embd", "dim"):
            size = getattr(owner, name, None)
            if isinstance(size, int):
                return size
    raise LayoutError("parallelize: the model's config tells no size of its hidden states")


def names_hidden_size(model: object) -> bool:
    """Return whether a model's config tells the features of its hidden states."""
    try:
        return hidden_size(model) > 0
    except LayoutError:
        return False


def join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def crosses(name: str) -> bool:
    """Return whether an attention module of this name attends to other rows than those of its queries."""
    inside = name.lower().rpartition(".decoder.")[2]
    return any(word in inside for word in CROSS)


def find_attention(model: nn.Module, hidden: int, casts: bool = False) -> tuple[list[AttentionRole], dict[str, str]]:
    """The attention modules of a model, and why others are left as they are; `casts` is that of `is_linear`."""
    found, reasons = [], {}
    modules = dict(model.named_modules())
    for name, module in modules.items():
        role = _attention(modules, name, module, hidden, casts)
        if isinstance(role, AttentionRole):
            found.append(role)
        elif role:
            reasons[name] = role
    return found, reasons


def _attention(
    modules: dict[str, nn.Module], name: str, module: nn.Module, hidden: int, casts: bool
) -> AttentionRole | str | None:
    at = partial(linear_at, modules, casts=casts)
    one_of = lambda names: next((f for n in names if (f := at(join(name, n)))), None)  # noqa: E731
    separate = {role: one_of(names) for role, names in (("q", Q), ("k", K), ("v", V))}
    fused = one_of(FUSED)
    if all(separate.values()):
        inputs = {role: str(child) for role, child in separate.items()}
    elif fused and separate["q"]:  # GPT-2's between stacks
        return f"{fused} has k and v in one, beside {separate['q']}"
    elif fused:
        inputs = {"qkv": fused}
    else:
        return None
    out = one_of(OUT)
    inside = out is not None
    output = str(out)
    if not inside:
        parent = name.rpartition(".")[0]
        output = next((f for n in OUT_BESIDE if (f := at(join(parent, n)))), "")
        if not output:
            return "no projection that leads back to hidden states was found beside it"
    sizes = {role: features(modules[child]) for role, child in inputs.items()}
    if any(size[0] != hidden for size in sizes.values()) or features(modules[output])[1] != hidden:
        return f"its projections do not lead from {hidden} features and back"
    inner = features(modules[output])[0]
    config = getattr(module, "config", None)
    head_dim = next((v for n in HEAD_DIMS if isinstance(v := getattr(module, n, None), int)), None)
    heads = next((v for o in (module, config) for n in NUM_HEADS if isinstance(v := getattr(o, n, None), int)), None)
    head_dim = head_dim or (inner // heads if heads and inner % heads == 0 else None)
    if not head_dim or inner % head_dim:
        return "the size of its heads was not found"
    heads = inner // head_dim
    if "qkv" in inputs:
        total = sizes["qkv"][1]
        kv = (total - inner) // 2
        order = next((ORDERS[kind] for kind in _kinds(module) if kind in ORDERS), None)
        if order is None:
            return f"{inputs['qkv']} has q, k and v in one, in an order that is not known of {type(module).__name__}"
        if total != inner + 2 * kv or kv % head_dim or not kv or not heads_in_order(order, heads, kv // head_dim):
            return f"{inputs['qkv']} has {total} features, which are not q, k and v of {heads} heads"
        return AttentionRole(name, inputs, output, inside, heads, kv // head_dim, head_dim, order)
    if sizes["q"][1] != inner or sizes["k"] != sizes["v"] or sizes["k"][1] % head_dim:
        return "q, k and v have sizes that are not those of heads"
    kv_heads = sizes["k"][1] // head_dim
    if heads % kv_heads:
        return f"{kv_heads} heads of k and v do not divide {heads} heads"
    return AttentionRole(name, inputs, output, inside, heads, kv_heads, head_dim)


def _kinds(module: nn.Module) -> set[str]:
    """`phi3.Phi3Attention` and the like: the classes of a module as the tables above have them."""
    return {_path(kind) for kind in type(module).__mro__}


def _path(kind: type) -> str:
    return f"{kind.__module__.rpartition('.')[2].removeprefix('modeling_')}.{kind.__name__}"


def vocabulary_of(model: object, which: str) -> Any:
    """Return the layer that `get_input_embeddings` or `get_output_embeddings` gives; None where that is none."""
    try:
        found = getattr(model, which)() if hasattr(model, which) else None
    except (NotImplementedError, AttributeError):  # code that looks for what this model was made without
        return None
    return found if isinstance(found, nn.Module) else None  # Perceiver's is a parameter


def around_layers(
    model: object, modules: dict[str, nn.Module], hidden: int, casts: bool = False
) -> tuple[int, set[str]]:
    """Features of an embedding that are not those of hidden states, and the Linears that lead there and back.

    They stand beside the layers, not in one; (hidden, none) where there are no such Linears.
    """
    table = vocabulary_of(model, "get_input_embeddings")
    size = table.embedding_dim if isinstance(table, nn.Embedding) else hidden
    there_and_back = (n for n, m in modules.items() if is_linear(m, casts) and {*features(m)} == {size, hidden})
    beside = {name for name in there_and_back if not any(map(str.isdigit, name.split(".")))}
    return (size, beside) if size != hidden and beside else (hidden, set())


def find_mlps(model: nn.Module, hidden: int, taken: set[str], casts: bool = False) -> list[MLPRole]:
    """The MLPs of a model: layers whose names or, where there are two, whose sizes lead there and back."""
    modules = dict(model.named_modules())
    found: list[MLPRole] = []
    for name in modules:
        role = _mlp(modules, name, hidden, taken, casts)
        if role is not None:
            found.append(role)
            taken |= {*role.ups, role.down}
    return found


def _mlp(modules: dict[str, nn.Module], name: str, hidden: int, taken: set[str], casts: bool) -> MLPRole | None:
    at = partial(linear_at, modules, casts=casts)

    def one_of(names: Sequence[str]) -> str:
        full = (at(join(name, each)) for each in names)
        return next((each for each in full if each and each not in taken), "")

    gate, up, both, down = (one_of(names) for names in (GATE, UP, BOTH, DOWN))
    if down and (both or up):
        inner, outer = features(modules[down])
        ups = (both,) if both else (gate, up) if gate else (up,)
        wide = inner * (2 if both else 1)
        if outer == hidden and all(features(modules[each]) == (hidden, wide) for each in ups):
            return MLPRole(name, ups, down, (inner, inner) if both else ())
    own = [] if is_wrapper(modules[name]) else [at(join(name, c)) for c in modules[name]._modules]
    own = [each for each in own if each and each not in taken]
    there = [each for each in own if features(modules[each])[0] == hidden != features(modules[each])[1]]
    back = [each for each in own if features(modules[each])[1] == hidden != features(modules[each])[0]]
    if len(there) == len(back) == 1 and features(modules[there[0]])[1] == features(modules[back[0]])[0]:
        return MLPRole(name, (there[0],), back[0])
    return None


EPS = ("eps", "variance_epsilon")
OTHER_EPS = (1e-5, 1e-6, 1e-8, 1e-12)  # in code that does not tell


@dataclass(frozen=True)
class NormRole:
    """The formula of a norm over hidden states.

    Attributes:
        eps: what it adds to the variance, and `eps_name` the attribute where its code finds that; "" where none has it.
        offset: of its gain.
    """

    centred: bool
    eps: float
    offset: float
    eps_name: str = ""


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_KNOWN_NORMS: dict[object, NormRole | str] = {}  # by all that a norm without buffers and hooks computes with


def norm_role(module: nn.Module, hidden: int) -> NormRole | str | None:
    """Return the norm over hidden states that a module is, found by a trial, or the reason why it is none."""
    if "norm" not in type(module).__name__.lower() or list(module.children()):
        return None
    weight = getattr(module, "weight", None)
    shape = getattr(module, "normalized_shape", None) or (None if weight is None else tuple(weight.shape))
    if shape is None or tuple(shape) != (hidden,):
        return None
    if set(module._parameters) - {"weight", "bias"}:
        return "it has parameters beside weight and bias"
    plain = {key: value for key, value in vars(module).items() if key not in _OF_EVERY_MODULE}
    has_more = module._buffers or module._forward_hooks or module._forward_pre_hooks
    if has_more or not all(type(value) in (int, float, str, bool, tuple, type(None)) for value in plain.values()):
        return _tried_norm(module, hidden)
    given = tuple(module._parameters.get(name) is not None for name in ("weight", "bias"))
    key = (type(module), type(module).forward, hidden, given, *plain.items())
    if key not in _KNOWN_NORMS:
        _KNOWN_NORMS[key] = _tried_norm(module, hidden)
    return _KNOWN_NORMS[key]


def _tried_norm(module: nn.Module, hidden: int) -> NormRole | str:
    told = {name: vars(module)[name] for name in EPS if isinstance(vars(module).get(name, ""), (float, NoneType))}
    eps_name, eps = next(iter(told.items()), ("", 1e-6))
    eps = default_eps(torch.float64) if eps is None else eps
    with torch.no_grad():
        trial = copy.deepcopy(module).to_empty(device="cpu").double()
        generator = torch.Generator().manual_seed(0)
        for parameter in trial.parameters():
            parameter.copy_(torch.randn(hidden, generator=generator))
        x = torch.randn(3, hidden, generator=generator).double() * 1e-2 + 1e-2
        try:
            y = trial(x)
        except Exception as error:
            return f"it could not be tried ({type(error).__name__})"
        w, b = (trial._parameters.get(name) for name in ("weight", "bias"))
        for role in (NormRole(*form) for form in product((True, False), dict.fromkeys((eps, *OTHER_EPS)), (0.0, 1.0))):
            gain = None if w is None else w + role.offset
            if role.centred:
                expected = F.layer_norm(x, (hidden,), gain, b, role.eps)
            else:
                expected = F.rms_norm(x, (hidden,), gain, role.eps)
                expected = expected if b is None else expected + b
            if y.shape == expected.shape and torch.allclose(y.double(), expected, rtol=1e-4, atol=1e-5):
                return replace(role, eps_name=eps_name if role.eps == eps else "")
    return "it is neither a layer norm nor an RMS norm of its features"
