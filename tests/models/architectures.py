"""Small stock models of transformers, and inputs for them."""

from __future__ import annotations

import torch

SIZES = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "head_dim": 8,
    "pad_token_id": 0,
    "attn_implementation": "sdpa",
}
NO_DROPOUT = {
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "dropout": 0.0,
    "dropout_rate": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "resid_dropout": 0.0,
}
GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "vocab_size": 67,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# class of the model: (class of its config, what differs from SIZES)
CAUSAL = {
    "LlamaForCausalLM": ("LlamaConfig", {}),
    "MistralForCausalLM": ("MistralConfig", {"sliding_window": 4}),
    "Qwen2ForCausalLM": ("Qwen2Config", {"tie_word_embeddings": True}),
    "Qwen3ForCausalLM": ("Qwen3Config", {}),
    "Gemma2ForCausalLM": (
        "Gemma2Config",
        {"attn_implementation": "eager", "sliding_window": 4, "tie_word_embeddings": True},
    ),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", {"sliding_window": 4, "tie_word_embeddings": True}),
    "Phi3ForCausalLM": ("Phi3Config", {}),
    "GPT2LMHeadModel": ("GPT2Config", GPT2),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", {"rotary_pct": 0.5}),
    "OPTForCausalLM": ("OPTConfig", {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "MixtralForCausalLM": ("MixtralConfig", {"experts_implementation": "eager", "num_local_experts": 2}),
}
ENCODERS = {
    "BertForMaskedLM": ("BertConfig", {}),
    "ViTForImageClassification": ("ViTConfig", {"image_size": 8, "patch_size": 4, "num_labels": 5}),
    "T5ForConditionalGeneration": (
        "T5Config",
        {"d_model": 32, "d_ff": 48, "d_kv": 8, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0,
         "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12},  # a trial goes beyond these
    ),
    "BartForConditionalGeneration": (
        "BartConfig",
        {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_start_token_id": 2},
    ),
}  # fmt: skip
ALL = CAUSAL | ENCODERS
# What layers have besides: norms over all heads, groups of q, k and v in one, embeddings narrower than hidden states.
BESIDES = {
    "Olmo2ForCausalLM": ("Olmo2Config", {}),
    "FalconForCausalLM": (
        "FalconConfig",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 48, "head_dim": None},
    ),
    "ElectraForMaskedLM": ("ElectraConfig", {"embedding_size": 18}),
}
# Other heads on the same: what a small classifier, one of tokens or of spans gives.
HEADS = {
    "BertForMaskedLM": ENCODERS["BertForMaskedLM"],
    "BertForSequenceClassification": ("BertConfig", {"num_labels": 3}),
    "BertForTokenClassification": ("BertConfig", {"num_labels": 3}),
    "BertForQuestionAnswering": ("BertConfig", {}),
    "LlamaForSequenceClassification": ("LlamaConfig", {"num_labels": 3}),
}


# Eight heads, which one axis of eight splits: what differs from the sizes above.
WIDE = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2}
WIDE_OF = {
    "GPT2LMHeadModel": {"n_embd": 64, "n_head": 8},
    "OPTForCausalLM": WIDE | {"word_embed_proj_dim": 64},
    "T5ForConditionalGeneration": {"d_model": 64, "num_heads": 8},
    "BartForConditionalGeneration": {"d_model": 64, "encoder_attention_heads": 8, "decoder_attention_heads": 8},
}


def build(name, **changes):
    """In fp64, with values of a seed; sizes that an architecture does not know do it no harm."""
    import transformers

    config_name, differs = (ALL | BESIDES | HEADS)[name]
    sizes = {} if name.startswith(("GPT2", "T5", "Bart")) else SIZES
    sizes = {"vocab_size": 67, "attn_implementation": "sdpa"} | sizes
    torch.manual_seed(7)
    given = {key: x for key, x in (sizes | NO_DROPOUT | differs | changes).items() if x is not None}
    config = getattr(transformers, config_name)(**given)
    model = getattr(transformers, name)(config).double()
    for parameter in model.parameters():  # biases and gains that tell themselves from zeros and ones
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape, dtype=parameter.dtype)
    return model.eval()


def inputs(name, batch=4, length=6):
    generator = torch.Generator().manual_seed(3)
    if name.startswith("ViT"):
        pixels = torch.randn(batch, 3, 8, 8, generator=generator, dtype=torch.float64)
        return {"pixel_values": pixels, "labels": torch.randint(0, 5, (batch,), generator=generator)}
    ids = torch.randint(3, 67, (batch, length), generator=generator)
    if name.endswith("QuestionAnswering"):
        spans = torch.randint(0, length, (2, batch), generator=generator)
        return {"input_ids": ids, "start_positions": spans[0], "end_positions": spans[1]}
    if name.endswith("Classification"):
        shape = ids.shape if "Token" in name else ids.shape[:1]
        return {"input_ids": ids, "labels": torch.randint(0, 3, shape, generator=generator)}
    return {"input_ids": ids, "labels": ids.masked_fill(torch.rand(ids.shape, generator=generator) < 0.2, -100)}


def as_dense(x, like):
    """A whole parameter or gradient of a model on a grid in the shape of the dense one's: without padding."""
    return x[tuple(map(slice, like.shape))]
