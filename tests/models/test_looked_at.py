"""Hooks on modules inside of split ones: what they get has the whole's sizes, and what they return is taken."""

from __future__ import annotations

import pytest
import torch
from products import mesh_of
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_map
from turns import by_turns

import ndtp
from ndtp import Grid, LayoutError

pytest.importorskip("transformers")
import transformers

SIZES = {"vocab_size": 48, "hidden_size": 16, "num_attention_heads": 4, "intermediate_size": 24}
IDS = torch.arange(24).view(3, 8) * 7 % 48  # three sequences, which two ranks do not divide
NO_DROPOUT = dict.fromkeys(
    ("resid_pdrop", "attn_pdrop", "embd_pdrop", "dropout_rate", "hidden_dropout_prob", "attention_probs_dropout_prob"),
    0.0,
)


def stock(kind: str, **sizes: object) -> nn.Module:
    torch.manual_seed(0)
    name = kind.partition("For")[0]
    config = getattr(transformers, f"{name.removesuffix('LMHeadModel')}Config")
    return getattr(transformers, kind)(config(**SIZES | {"num_hidden_layers": 1} | NO_DROPOUT | sizes))


LAYERS = {
    "few key heads, norms of each head": lambda: stock("Qwen3ForCausalLM", num_key_value_heads=1, head_dim=4),
    "norms over all heads": lambda: stock("Olmo2ForCausalLM", num_key_value_heads=2),
    "q, k and v in one": lambda: stock("GPT2LMHeadModel", attn_implementation="eager"),
    "an output elsewhere": lambda: stock("BertForMaskedLM", attn_implementation="eager"),
    "sinks": lambda: stock("GptOssForCausalLM", num_key_value_heads=2, head_dim=4, num_local_experts=4),
    "biases of positions": lambda: stock(
        "T5ForConditionalGeneration", d_kv=4, decoder_start_token_id=0, pad_token_id=0
    ),
}
CHANGED = ("q_proj", "query", "c_attn", "q", "k_norm")


def whole(x: object) -> object:
    return tree_map(lambda y: getattr(y, "gathered", lambda: y)().detach() if isinstance(y, Tensor) else None, x)


class Hooks:
    """Hooks of every kind on every part of a model, which note what they get, and change some of it."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: dict[str, list[object]] = {}
        self.loss: Tensor | float = 0.0
        self.handles = []
        for name, part in model.named_modules():
            if not list(part.children()) and not isinstance(part, nn.ModuleList):
                self.handles += [
                    part.register_forward_pre_hook(self.noting(name, "enters"), with_kwargs=True),
                    part.register_forward_hook(self.noting(name, "leaves"), with_kwargs=True, always_call=True),
                ]
                if not isinstance(part, nn.Embedding):
                    self.handles.append(part.register_full_backward_hook(self.noting(name, "backward")))
            last = name.rpartition(".")[2]
            if last in CHANGED:
                self.handles += [
                    part.register_forward_hook(self.changed),
                    part.register_full_backward_pre_hook(lambda _, grads: (2 * grads[0],)),
                    part.register_full_backward_hook(
                        lambda _, grads, __: (0.5 * grads[0],) if grads[0] is not None else None
                    ),
                ]

    def noting(self, name: str, what: str) -> object:
        def hook(_: nn.Module, *given: object) -> None:
            self.seen.setdefault(f"{name} {what}", []).append(whole([x for x in given if not isinstance(x, dict)]))

        return hook

    def changed(self, _: nn.Module, args: object, y: Tensor) -> Tensor:
        self.loss = self.loss + y.square().mean()
        y.register_hook(lambda grad: self.seen.setdefault("gradient of a tensor", []).append(whole(grad)))
        return getattr(y, "gathered", lambda: y)().flip(-1)  # given whole

    def remove(self) -> None:
        for each in self.handles:
            each.remove()


def step(model: nn.Module, has_hooks: bool = True, **given: Tensor) -> tuple[dict[str, object], Hooks | None]:
    model.zero_grad()
    hooks = Hooks(model) if has_hooks else None
    out = model(**given)
    loss = out.loss + (hooks.loss if hooks else 0.0)
    loss.backward()
    if hooks:
        hooks.remove()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss, "logits": whole(out.logits), **grads}, hooks


def same(mine: object, theirs: object, what: str) -> None:
    if isinstance(theirs, Tensor):
        assert isinstance(mine, Tensor), what
        mine = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
        mine = mine.reshape(theirs.shape) if mine.numel() == theirs.numel() and mine.dim() == 4 else mine
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=2e-5, msg=lambda text: f"{what}: {text}")
    elif isinstance(theirs, (list, tuple)):
        assert len(mine) == len(theirs), what
        for i, (x, y) in enumerate(zip(mine, theirs, strict=True)):
            same(x, y, f"{what}, {i}")
    elif isinstance(theirs, dict):
        assert mine.keys() == theirs.keys(), (what, mine.keys() ^ theirs.keys())
        for key, y in theirs.items():
            same(mine[key], y, f"{what}, {key}")
    else:
        assert mine is theirs, what


def check_layers(kind: str, scheme: str) -> None:
    given = {"input_ids": IDS, "labels": IDS}
    dense, model = LAYERS[kind](), ndtp.parallelize(LAYERS[kind](), mesh_of(Grid(x=2)), scheme=scheme)
    for has_hooks in (True, False) if "few" in kind else (True,):
        expected, theirs = step(dense, has_hooks, **given)
        got, mine = step(model, has_hooks, **given)
        same(got, expected, f"{kind}, {scheme}")
        if theirs:
            same(mine.seen, theirs.seen, f"{kind}, {scheme}: hooks")


@pytest.mark.parametrize("kind", by_turns(LAYERS, 3))
def test_hooks_get_and_give_what_the_dense_models_do(kind: str, ranks) -> None:
    ranks(2).run(check_layers, kind, "1d-sp" if "in" in kind else "1d")


def steer(module: nn.Module, given: object, y: Tensor) -> None:
    """What is written to a view of hidden states is theirs."""
    y[:, -1].add_(0.5)
    y.transpose(0, 1)[0].mul_(2)


def check_from_before() -> None:
    """A hook of before `parallelize`, in generation; a cache of when there was a hook; hooks of all modules."""
    model, shapes, prompt = stock("LlamaForCausalLM", num_key_value_heads=2), [], IDS[:, :3]
    own = model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda _, __, y: shapes.append(y.shape) or 2 * y)
    expected = model.generate(prompt, max_new_tokens=3, do_sample=False)
    asked, shapes[:] = list(shapes), []
    ndtp.parallelize(model, mesh_of(Grid(x=2)), scheme="1d")
    assert model.generate(prompt, max_new_tokens=3, do_sample=False).equal(expected) and shapes == asked
    cache = model(prompt, use_cache=True).past_key_values
    own.remove()
    with pytest.raises(LayoutError, match="before hooks were taken off its parts"):
        model(IDS[:, 3:4], past_key_values=cache)
    for name in ("model.layers.0", "model.layers.0.self_attn.k_proj", "model.layers.0.mlp.up_proj", "model.norm"):
        old = model.get_submodule(name).register_backward_hook(lambda *_: None)
        with pytest.raises(LayoutError, match=r"register_backward_hook .*\n  fix: register_full_backward_hook"):
            model(IDS)
        old.remove()
    dense = stock("LlamaForCausalLM", num_key_value_heads=2)
    steered = [each.model.layers[0].register_forward_hook(steer) for each in (dense, model)]
    torch.testing.assert_close(whole(model(IDS).logits), dense(IDS).logits.detach())
    steered[1].remove()
    for_all = register_module_forward_hook(
        lambda part, _, y: shapes.append((part, y.shape)) if isinstance(y, Tensor) else None
    )
    try:
        model(IDS)
    finally:
        for_all.remove()
    seen = dict(shapes[len(asked) + 1 :])
    assert seen[model.model.layers[0].self_attn.q_proj] == (3, 8, 16) and seen[model.lm_head] == (3, 8, 48)


def check_experts() -> None:
    given = {"input_ids": IDS, "labels": IDS}
    sizes = {"num_key_value_heads": 2, "num_local_experts": 4, "experts_implementation": "eager"}
    both = [stock("MixtralForCausalLM", **sizes) for _ in range(2)]
    ndtp.parallelize(both[1], mesh_of(Grid(x=2)), scheme="1d")
    seen: list[list[object]] = []
    steps = []
    for model in both:
        noted: list[object] = []
        part = model.model.layers[0].mlp.experts.act_fn
        handle = part.register_forward_hook(lambda _, args, y, noted=noted: noted.append(whole([*args, y])) or 2 * y)
        steps.append(step(model, False, **given)[0])
        handle.remove()
        seen.append(noted)
    assert len(seen[1]) > 1
    same(seen[1], seen[0], "experts: hooks")
    same(steps[1], steps[0], "experts")


def check_gradients() -> None:
    """Of tensors that hooks hand out: kept, and asked for."""
    found = []
    for model in (
        stock("LlamaForCausalLM"),
        ndtp.parallelize(stock("LlamaForCausalLM"), mesh_of(Grid(x=2)), scheme="1d-sp"),
    ):
        handed: list[Tensor] = []
        inner = model.model
        for part in (inner.embed_tokens, inner.layers[0].self_attn.q_proj, inner.layers[0].mlp.up_proj):
            part.register_forward_hook(lambda _, __, y, handed=handed: handed.append(y) or y.retain_grad())
        loss = model(input_ids=IDS, labels=IDS).loss
        asked = torch.autograd.grad(loss, handed, retain_graph=True)
        loss.backward()
        found.append(whole([*asked, *(y.grad for y in handed)]))
    same(found[1], found[0], "gradients")


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.act, self.down = nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


def check_pair() -> None:
    found = []
    for model in (Pair(), ndtp.parallelize(Pair(), mesh_of(Grid(x=2)), {"up": "up", "down": "down"}, scheme="1d-sp")):
        seen: list[object] = []
        for part in (model.up, model.act, model.down):
            part.register_forward_hook(lambda _, args, y, seen=seen: seen.append(whole([*args, y])))
            part.register_full_backward_hook(lambda _, *grads, seen=seen: seen.append(whole(grads)))
        model.act.register_full_backward_hook(
            lambda _, grads, __: (getattr(grads[0], "gathered", lambda: grads[0])().flip(-1),)
        )
        y = model(torch.linspace(-1, 1, 54).view(3, 3, 6).requires_grad_())
        (y * y).sum().backward()
        found.append([seen, [p.grad for p in model.parameters()]])
    same(found[1], found[0], "a pair")


@pytest.mark.parametrize(
    "check", [check_from_before, check_experts, check_gradients, check_pair], ids=lambda f: f.__name__
)
def test_hooks(check: object, ranks) -> None:
    ranks(2).run(check)


ALONE = {
    "few key heads, norms of each head": ({"x": 2}, "1d-sp"),
    "q, k and v in one": ({"z": 2}, "3d"),
    "an output elsewhere": ({"y": 2}, "1d"),
}


def check_called_alone(kind: str) -> None:
    """Parts of attention that other code calls, with other rows than the model's: before, after and in a forward."""
    sizes, scheme = ALONE[kind]
    dense, model = LAYERS[kind](), ndtp.parallelize(LAYERS[kind](), mesh_of(Grid(**sizes)), scheme=scheme)
    names = [name for name, part in model.named_modules() if getattr(part, "core", None) is not None]
    assert names
    for name in names:
        part, theirs = model.get_submodule(name), dense.get_submodule(name)
        width = theirs.weight.shape[0 if kind.startswith("q, k") else 1]
        rows = [
            torch.randn(*lead, width, generator=torch.Generator().manual_seed(0))
            for lead in ((3, 8), (24,), (2, 3, 4), (7,), (), (0,))
        ]
        found: list[list[object]] = []
        for layer in (part, theirs):
            own = [x.clone().requires_grad_() for x in rows]
            layer.weight.grad = None
            sum((layer(x) ** 2).sum() for x in own).backward()
            found.append([layer.weight.grad, *(x.grad for x in own)])
        same(*found, f"{name}: gradients")
        around, seen = model.get_submodule(name.rpartition(".")[0]), []
        for hook in (around.register_forward_hook, around.register_forward_pre_hook):
            hook(lambda *_, part=part, rows=rows, seen=seen: seen.append([whole(part(x)) for x in rows]))
        model(IDS)
        around._forward_hooks.clear(), around._forward_pre_hooks.clear()
        same(seen, [[theirs(x) for x in rows]] * 2, name)
        with pytest.raises(LayoutError, match=rf"{name}' takes {width} features, and got"):
            part(torch.ones(3, width - 1))


@pytest.mark.parametrize("kind", ALONE)
def test_parts_of_attention_that_other_code_calls(kind: str, ranks) -> None:
    ranks(2).run(check_called_alone, kind)
