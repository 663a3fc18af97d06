"""`ndtp train --model`: models that cannot be trained so are refused before any rank is started, with what to do."""

import json

import pytest
from test_train import train

from ndtp.models.trial import most_tokens, sees_later_tokens

transformers = pytest.importorskip("transformers")
WIDTHS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
LLAMA = transformers.LlamaConfig(vocab_size=256, max_position_embeddings=16, **WIDTHS)
GPT2 = transformers.GPT2Config(vocab_size=256, n_embd=16, n_layer=2, n_head=2, n_positions=32)
BERT = transformers.BertConfig(vocab_size=256, **WIDTHS)
DECODER = transformers.BertConfig(vocab_size=256, is_decoder=True, **WIDTHS)
ROBERTA = transformers.RobertaConfig(vocab_size=256, is_decoder=True, max_position_embeddings=34, **WIDTHS)
GPTJ = transformers.GPTJConfig(vocab_size=256, n_embd=16, n_layer=2, n_head=2, rotary_dim=4, n_positions=32)


class Started(Exception):
    """Ranks would have been started now."""


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """Train a model up to where ranks start; the result's exception is `Started` where nothing was refused."""

    def starts(*_, **__):
        raise Started

    monkeypatch.setattr("ndtp.cli.progress.Runner.run", starts)

    def run(config, *words):
        content = config if isinstance(config, dict) else config.to_dict()
        (tmp_path / "config.json").write_text(json.dumps(content))
        return train("--model", tmp_path, "--output", tmp_path / "out", *words)

    return run


def refused(result, option):
    """Return the one message of a refusal."""
    assert result.exit_code == 2 and not isinstance(result.exception, Started), result.output
    assert result.stderr.count("error: ") == 1 and f"Invalid value for {option}: " in result.stderr, result.stderr
    return result.stderr


def test_a_folder_is_taken_and_one_without_a_config_is_named(checked, tmp_path):
    assert isinstance(checked(LLAMA).exception, Started)
    (tmp_path / "empty").mkdir()
    result = train("--model", tmp_path / "empty", "--output", tmp_path / "out")
    assert "is a folder without a config.json; fix: " in refused(result, "--model")


@pytest.mark.parametrize(
    "config, says",
    [
        (transformers.T5Config(), "model_type='t5' has no causal language model in transformers"),
        (transformers.ViTConfig(), "model_type='vit' has no causal language model"),
        (transformers.CLIPConfig(), "model_type='clip' has no causal language model"),
        ({"model_type": "nonesuch"}, "knows no model_type='nonesuch'; fix: "),
        (LLAMA.to_dict() | {"hidden_size": "wide"}, "transformers takes no such config of 'llama': "),
        (LLAMA.to_dict() | {"num_attention_heads": 0}, "of 'llama': "),
        (BERT, "in BertLMHeadModel each token sees the tokens behind it, which it is to predict; fix: is_decoder=true"),
        ({"model": 1}, "is no config.json of transformers"),
    ],
    ids=lambda value: getattr(value, "model_type", None) or "",
)
def test_what_is_no_causal_language_model(checked, config, says):
    assert says in refused(checked(config), "--model")


def test_tokens_that_see_later_ones_are_found_by_running_the_model():
    bidirectional = transformers.Gemma3TextConfig(
        vocab_size=256, use_bidirectional_attention=True, num_key_value_heads=1, head_dim=8, **WIDTHS
    )
    for kind, config, sees in (
        (transformers.BertLMHeadModel, BERT, True), (transformers.BertLMHeadModel, DECODER, False),
        (transformers.GPT2LMHeadModel, GPT2, False), (transformers.LlamaForCausalLM, LLAMA, False),
        (transformers.Gemma3ForCausalLM, bidirectional, True),
        (transformers.T5ForConditionalGeneration, transformers.T5Config(num_layers=1), None),
    ):  # fmt: skip
        assert sees_later_tokens(kind, config) is sees, config.model_type


def test_the_longest_sequence_is_that_of_a_table_of_positions():
    """RoBERTa leaves two rows of its table out; GPT-J's table is of rotary positions; Llama computes its own."""
    for kind, config, most in (
        (transformers.GPT2LMHeadModel, GPT2, 32), (transformers.RobertaForCausalLM, ROBERTA, 32),
        (transformers.GPTJForCausalLM, GPTJ, 32), (transformers.LlamaForCausalLM, LLAMA, None),
    ):  # fmt: skip
        assert most_tokens(kind, config, 100) == most, config.model_type
        small = transformers.AutoModelForCausalLM.from_config(config)
        ids = transformers.BatchEncoding({"input_ids": [[5] * (most or 100)]}, tensor_type="pt")
        assert small(**ids).logits.shape[1] == (most or 100)
        if most is not None:
            with pytest.raises((IndexError, RuntimeError)):
                small(**transformers.BatchEncoding({"input_ids": [[5] * (most + 1)]}, tensor_type="pt"))


def test_sequences_and_samples_longer_than_the_positions(checked):
    message = refused(checked(GPT2, "--context", 32), "--context")
    assert "GPT2LMHeadModel takes 32; fix: --context 31, or a larger n_positions than 32 in " in message
    message = refused(checked(GPT2, "--context", 16, "--sample", 50, "--prompt", "fox"), "--sample")
    assert (
        "50 tokens behind the 3 of the prompt take 52 positions, GPT2LMHeadModel takes 32; fix: --sample 30" in message
    )
    for config, *words in (
        (GPT2, "--context", 31), (GPT2, "--sample", 30, "--prompt", "fox"), (LLAMA, "--context", 64, "--sample", 64)
    ):  # fmt: skip
        assert isinstance(checked(config, *words).exception, Started), words


def test_a_vocabulary_without_the_bytes_of_a_text_and_a_prompt_that_nothing_follows(checked, tmp_path):
    (tmp_path / "text").write_text("to be or not to be. " * 20)
    small = transformers.LlamaConfig(vocab_size=100, **WIDTHS)
    assert "has token 116, the model's vocabulary has 100" in refused(checked(small, tmp_path / "text"), "FILE")
    assert "fix: --sample 100" in refused(checked(LLAMA, "--prompt", "fox"), "--prompt")
