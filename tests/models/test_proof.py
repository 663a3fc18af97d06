"""Attention whose code is no function of single heads and sequences is found by a trial, and left whole by name."""

from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

import transformers
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

from ndtp.models.proofs import Proofs
from ndtp.models.roles import find_attention

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}


def model_of(kind="Llama", **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | {"num_hidden_layers": 2} | changes)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


def reasons(model, splits=2):
    roles, _ = find_attention(model, 16)
    proofs = Proofs(model, roles, 16, splits)
    return [proofs.why_not(role) for role in roles]


@pytest.mark.parametrize("config", [{"dropout": 0.5}, "of another kind", object()], ids=["dict", "str", "object"])
def test_modules_have_a_config_of_any_kind(config):
    model = model_of()
    model.model.layers[0].self_attn.q_proj.config = config
    assert not any(reasons(model))


def before_the_last(change):
    """Attention that does something to the heads of its result, [batch, sequence, heads, features]."""

    class Attention(LlamaAttention):
        def forward(self, *args, **kwargs):
            last, size = self.o_proj, self.head_dim
            changed = lambda x: last(change(x.unflatten(-1, (-1, size))).flatten(-2))  # noqa: E731
            self._modules["o_proj"] = Called(changed)
            try:
                return super().forward(*args, **kwargs)
            finally:
                self._modules["o_proj"] = last

    return Attention


class Called(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def test_code_that_hands_fewer_tokens_to_its_last_projection_is_found():
    model = model_of()
    model.model.layers[0].self_attn.__class__ = before_the_last(lambda x: x[:, :1])
    reason, other = reasons(model)
    assert "tokens to its last projection" in reason and not other


MIXES = {
    "pairs": lambda x: x + x.roll(1, 2),
    "a norm over all heads": lambda x: x / x.square().mean((2, 3), keepdim=True).sqrt(),
    "a softmax over heads": lambda x: x.softmax(2),
    "what its number is": lambda x: x * torch.arange(1, x.shape[2] + 1)[:, None],
    "sequences": lambda x: x - x.mean(0, keepdim=True),
}


@pytest.mark.parametrize("what", MIXES)
def test_code_that_mixes_heads_or_sequences_is_found(what):
    model = model_of()
    for layer in model.model.layers:
        layer.self_attn.__class__ = before_the_last(MIXES[what])
    assert all("give other numbers by themselves" in str(reason) for reason in reasons(model))


def test_code_that_does_something_to_each_head_is_not():
    model = model_of(num_key_value_heads=2)
    for layer in model.model.layers:
        layer.self_attn.__class__ = before_the_last(lambda x: x * x.square().mean(3, keepdim=True))
    assert reasons(model) == [None, None]
    assert reasons(model, splits=4) == [None, None]  # fewer key heads than parts


def test_code_that_mixes_heads_of_many_tokens_is_found():
    """As windows do that some heads have alone; the number is in the code, or an attribute that the code reads."""
    of_many = lambda x, limit: x - x.mean(2, keepdim=True) if x.shape[1] > limit else x  # noqa: E731
    here = SimpleNamespace(window=50)
    for change in (lambda x: of_many(x, 40), lambda x: of_many(x, here.window)):
        model = model_of()
        for layer in model.model.layers:
            layer.self_attn.__class__ = before_the_last(change)
            layer.self_attn.window = here.window
        assert all("give other numbers by themselves" in str(reason) for reason in reasons(model))
        assert reasons(model_of()) == [None, None]


class Keeps(LlamaAttention):
    def forward(self, hidden_states, **others):
        self.config.shared = {"v": self.v_proj(hidden_states)}
        return super().forward(hidden_states=hidden_states, **others)


class Reads(LlamaMLP):
    def forward(self, x):
        return super().forward(x) + self.config.shared["v"].sum()


def test_heads_that_other_code_reads_stay_whole():
    """As layers do that take keys and values of another layer."""
    model = model_of()
    model.model.layers[0].self_attn.__class__ = Keeps
    model.model.layers[1].mlp.__class__ = Reads
    first, second = reasons(model)
    assert "reads keys or values of its heads" in first and second is None


def test_layers_behind_experts_are_reached():
    model = model_of("GptOss", num_local_experts=4, head_dim=4, num_key_value_heads=2)
    roles, _ = find_attention(model, 16)
    assert set(Proofs(model, roles, 16, 2).seen.calls) == {role.name for role in roles}
    assert reasons(model) == [None, None]


def test_a_residual_and_a_norm_behind_the_last_projection_are_no_matter_of_heads():
    torch.manual_seed(0)
    model = transformers.AlbertForMaskedLM(transformers.AlbertConfig(**SIZES, embedding_size=8, num_hidden_layers=1))
    assert set(reasons(model)) == {None}


@pytest.mark.parametrize("kind", ["DiffLlama", "Llama"])
def test_heads_that_are_combined_in_pairs(kind):
    assert all(bool(reason) == (kind == "DiffLlama") for reason in reasons(model_of(kind)))


@pytest.mark.parametrize("kind", ["DiffLlama", "Llama"])
def test_trials_are_on_the_cpu_whatever_the_default_device_and_seed_no_other(kind):
    """An index out of range is an error there, and ends the process on a GPU."""
    model = model_of(kind)
    with torch.device("meta"), mock.patch.object(torch, "manual_seed", side_effect=AssertionError("seeds all devices")):
        assert all(bool(reason) == (kind == "DiffLlama") for reason in reasons(model))


def test_the_program_draws_on_as_if_nothing_had_drawn():
    model = model_of(hidden_act="gelu")
    state = torch.get_rng_state()
    reasons(model)
    assert torch.equal(torch.get_rng_state(), state)


class Set(nn.Module):
    """What is done to heads, by what it is set to: as a word, a function, an object or a table."""

    def __init__(self, word="", function=None, table=(), options=None):
        super().__init__()
        self.word, self.function, self.options = word, function, options
        self.register_buffer("table", torch.tensor(table, dtype=torch.long))

    def forward(self, x):
        x = x.flip(2) if self.word == "flip" else x
        x = x.flip(2) if "flip" in (getattr(self.options, "words", None) or self.options or ()) else x
        x = x if self.function is None else self.function(x)
        return x[:, :, self.table[: x.shape[2]]] if len(self.table) else x


def rolled(x):
    return x.roll(1, 2)


def same(x):
    return x


@pytest.mark.parametrize(
    "settings",
    [
        ({}, {"word": "flip"}),
        ({"function": same}, {"function": rolled}),
        ({"function": partial(torch.roll, shifts=0, dims=2)}, {"function": partial(torch.roll, shifts=1, dims=2)}),
        ({}, {"options": {"flip": True}}),
        ({"options": SimpleNamespace(words=["same"])}, {"options": SimpleNamespace(words=["flip"])}),
        ({"table": (0, 1, 2, 3)}, {"table": (0, 2, 1, 3)}),
    ],
    ids=["word", "function", "partial", "dict", "object", "table"],
)
def test_layers_whose_parts_are_set_otherwise_are_tried_each(settings):
    """Of one class of attention, with parts of one class."""

    class Attention(LlamaAttention):
        def forward(self, *args, **kwargs):
            last, size = self.o_proj, self.head_dim
            self._modules["o_proj"] = Called(lambda x: last(self.part(x.unflatten(-1, (-1, size))).flatten(-2)))
            try:
                return LlamaAttention.forward(self, *args, **kwargs)
            finally:
                self._modules["o_proj"] = last

    model = model_of()
    for layer, given in zip(model.model.layers, settings, strict=True):
        layer.self_attn.__class__, layer.self_attn.part = Attention, Set(**given)
    found = reasons(model)
    assert found[0] is None and found[1], found
