"""Architectures that nobody named in ndtp, as a user would try them: equal to dense, or left alone with a reason.

    python tests/models/other_architectures.py [--only Bloom CLIP ...] [--scheme 2d] [--ranks 2]

Loss, logits, all gradients and generated tokens of small random models in fp64 (fp32 where a model's own code wants it)
against dense, and what stayed whole and why.  `test_every_grid.py` runs a sample of them.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # of `products`

import torch
import transformers
import transformers.modeling_layers
import transformers.modeling_utils  # so that ranks are forked with it
from architectures import NO_DROPOUT, SIZES, as_dense
from products import mesh_of

import ndtp
import ndtp.testing
from ndtp import Grid
from ndtp.models.hidden import whole

OFF = dict.fromkeys(
    ("activation_dropout", "classifier_dropout", "layerdrop", "attn_dropout", "embedding_dropout", "pooler_dropout",
     "feat_proj_dropout", "final_dropout", "mask_time_prob", "drop_path_rate"), 0.0,
)  # fmt: skip
OURS = SIZES | NO_DROPOUT | OFF | {"attn_implementation": None, "bos_token_id": 1, "eos_token_id": 2}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "n_inner": 48}
BOTH_STACKS = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_start_token_id": 2,
}  # fmt: skip
PATCHES = {"image_size": 8, "patch_size": 4, "num_labels": 3}
LONG = {"max_position_embeddings": 40}  # positions begin behind the one of padding
RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
TOWERS = {"text_config": OURS | {"projection_dim": 16}, "projection_dim": 16}
AUDIO = {
    "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer", "vocab_size": 12, "apply_spec_augment": False,
}  # fmt: skip
# class of the model, after a word where there are several of one: what differs from the sizes above.
OTHERS = {
    **{f"{name}ForCausalLM": {} for name in (
        "Cohere", "Cohere2", "Ernie4_5", "Exaone4", "Gemma", "Glm", "Glm4", "GptOss", "Granite", "Helium", "Nemotron",
        "Olmo", "Olmo2", "Olmo3", "Olmoe", "Persimmon", "Phi", "Qwen2Moe", "Qwen3Moe", "SmolLM3", "StableLm",
        "Starcoder2",
    )},
    "AlbertForMaskedLM": {"embedding_size": 16},
    "BartForSequenceClassification": BOTH_STACKS | {"num_labels": 3},
    "BeitForImageClassification": PATCHES,
    "BertForPreTraining": {},
    "BlenderbotSmallForConditionalGeneration": BOTH_STACKS,
    "BloomForCausalLM": {"n_head": 4, "n_layer": 2},
    "CLIPModel": TOWERS | {"vision_config": OURS | PATCHES | {"projection_dim": 16}},
    "two widths, CLIPModel": TOWERS | {"vision_config": OURS | PATCHES | {"projection_dim": 16, "hidden_size": 48}},
    "CTRLLMHeadModel": GPT | {"dff": 48},
    "CodeGenForCausalLM": GPT | {"rotary_dim": 4, "n_head": 8, "num_attention_heads": 8},
    "normed heads, CohereForCausalLM": {"use_qk_norm": True},
    "BitNetForCausalLM": {},
    "DebertaForMaskedLM": RELATIVE,
    "DebertaV2ForMaskedLM": RELATIVE | {"position_biased_input": False},
    "shared keys, DebertaV2ForMaskedLM": RELATIVE | {"share_att_key": True},
    "DeiTForImageClassification": PATCHES,
    "Dinov2ForImageClassification": PATCHES,
    "DistilBertForMaskedLM": {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    "ElectraForMaskedLM": {"embedding_size": 16},
    "FalconForCausalLM": {"multi_query": True, "ffn_hidden_size": 48},
    "all heads, FalconForCausalLM": {"multi_query": False, "ffn_hidden_size": 48, "alibi": True},
    "groups, FalconForCausalLM": {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 48},
    "GPT2ForSequenceClassification": GPT | {"num_labels": 3},
    "GPTBigCodeForCausalLM": GPT,
    "all heads, GPTBigCodeForCausalLM": GPT | {"multi_query": False},
    "GPTJForCausalLM": GPT | {"rotary_dim": 4},
    "GPTNeoForCausalLM": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    "LEDForConditionalGeneration": BOTH_STACKS | {"attention_window": 4},
    "LlamaForTokenClassification": {"num_labels": 3},
    "M2M100ForConditionalGeneration": BOTH_STACKS,
    "MBartForConditionalGeneration": BOTH_STACKS,
    "MPNetForMaskedLM": LONG,
    "MambaForCausalLM": {"state_size": 4},
    "MarianMTModel": BOTH_STACKS | {"decoder_vocab_size": 67},
    "ModernBertForMaskedLM": {},
    "MptForCausalLM": {"d_model": 32, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 32},
    "OpenAIGPTLMHeadModel": GPT,
    "OPTForCausalLM": {"word_embed_proj_dim": 16, "ffn_dim": 48, "do_layer_norm_before": False},
    "PegasusForConditionalGeneration": BOTH_STACKS,
    "RobertaForMaskedLM": LONG,
    "RobertaForSequenceClassification": LONG | {"num_labels": 3},
    "norms a head, StableLmForCausalLM": {"qk_layernorm": True},
    "SiglipModel": {"text_config": OURS, "vision_config": OURS | PATCHES},
    "Wav2Vec2ForCTC": AUDIO,
    "WhisperForConditionalGeneration": BOTH_STACKS
    | {"num_mel_bins": 8, "max_source_positions": 6, "max_target_positions": 16},
    "XGLMForCausalLM": {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48},
    "XLMRobertaForMaskedLM": LONG,
}  # fmt: skip
SAMPLE = (
    "BloomForCausalLM", "all heads, GPTBigCodeForCausalLM", "CodeGenForCausalLM", "DebertaV2ForMaskedLM",
    "shared keys, DebertaV2ForMaskedLM", "LEDForConditionalGeneration", "AlbertForMaskedLM", "OlmoForCausalLM",
    "CLIPModel", "GptOssForCausalLM", "norms a head, StableLmForCausalLM",
)  # fmt: skip
IN_FP32 = ("GptOss", "Olmoe", "Qwen2Moe", "Qwen3Moe", "XGLM")  # products of experts, or masks, of that alone


def build(name, **changes):
    kind = getattr(transformers, name.rpartition(" ")[2])
    ours = {} if "text_config" in OTHERS[name] else OURS
    ours = {key: x for key, x in ours.items() if x is not None and (key, "Falcon" in name) != ("head_dim", True)}
    torch.manual_seed(7)
    model = kind(kind.config_class(**ours | OTHERS[name] | changes))
    model = model.float() if name.startswith(IN_FP32) else model.double()
    for parameter in model.parameters():  # biases and gains that tell themselves from zeros and ones
        if parameter.dim() == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape, dtype=parameter.dtype)
    return model.eval()


def inputs(name, batch=4, length=6):
    generator, kind = torch.Generator().manual_seed(3), name.rpartition(" ")[2]
    real = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    ids = torch.randint(3, 67, (batch, length), generator=generator)
    few = torch.randint(0, 3, ids.shape, generator=generator)
    if "ImageClassification" in kind:
        return {"pixel_values": real(batch, 3, 8, 8), "labels": few[:, 0]}
    if kind.endswith("Model") and kind.startswith(("CLIP", "Siglip")):
        return {"input_ids": ids, "pixel_values": real(batch, 3, 8, 8), "return_loss": True}
    if kind.startswith("Whisper"):
        return {"input_features": real(batch, 8, 12), "labels": ids}
    if kind.startswith("Wav2Vec2"):
        return {"input_values": real(batch, 400), "labels": ids[:, :4] % 11 + 1}
    if kind.endswith("PreTraining"):
        return {"input_ids": ids, "labels": ids, "next_sentence_label": few[:, 0] % 2}
    if kind.endswith("SequenceClassification"):
        ids[:, -1] = 2
        return {"input_ids": ids, "labels": few[:, 0]}
    return {"input_ids": ids, "labels": few if kind.endswith("TokenClassification") else ids}


def compare(name, sizes, scheme, **changes):
    """What stayed whole and why; runs on every rank.  An assertion where something differs."""
    mesh, given = mesh_of(Grid(sizes)), inputs(name)
    dense, model = (build(name, **changes) for _ in range(2))
    times = 300.0 if name.startswith(IN_FP32) else 1.0
    close = {"rtol": 1e-5 * times, "atol": 1e-5 * times}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of what is gathered: it is in the report
        report = ndtp.parallelize(model, mesh, scheme=scheme, strict=False).ndtp_report
        expected, out = dense(**given), model(**given)
        torch.testing.assert_close(out.loss, expected.loss, **close, msg=lambda text: f"{name}: loss: {text}")
        if "logits" in out:
            torch.testing.assert_close(whole(out.logits), expected.logits, **close, msg=lambda t: f"{name}: {t}")
        expected.loss.backward()
        out.loss.backward()
        for (key, mine), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
            found = 0.0 if mine.grad is None else as_dense(mine.grad.full_tensor(), theirs)
            wanted = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
            error, scale = (found - wanted).abs().max().item(), wanted.abs().max().item()
            assert error <= times * (1e-5 * scale + 1e-7), f"{name}: gradient of {key}, {error:.1e} of {scale:.1e}"
        if dense.can_generate() and "input_ids" in given:
            options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}
            tokens = [each.generate(given["input_ids"], **options) for each in (dense, model)]
            assert torch.equal(*tokens), f"{name}: other tokens"
    return report.parameters, report.kept


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="architectures whose names have one of these")
    parser.add_argument("--scheme", default="2d")
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    sizes = {"x": arguments.ranks} if arguments.scheme.startswith("1d") else {"x": 1, "y": arguments.ranks}
    failed = 0
    for name in OTHERS:
        if not any(part in name for part in arguments.only):
            continue
        try:
            counts, kept = ndtp.testing.run(compare, arguments.ranks, args=(name, sizes, arguments.scheme))[0]
        except ndtp.testing.RankError as error:
            failed += 1
            print(f"{name:42} FAILED {str(error).splitlines()[0]}", flush=True)
            continue
        reasons = "; ".join(dict.fromkeys(f"{key}: {why}" for key, why in kept.items()))
        print(f"{name:42} equal, {counts[1] / counts[0]:6.1%} split  {reasons[:200]}", flush=True)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
