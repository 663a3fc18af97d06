"""Losses of stock models along dp: of several terms, of labels that do not count, sums, and those of routers."""

import re

import pytest
import torch
from architectures import build
from products import mesh_of
from torch import nn
from torch.nn import functional as F

import ndtp
from ndtp import Grid, LayoutError
from ndtp.models.loss_terms import terms_of

transformers = pytest.importorskip("transformers")
BERT = {
    "vocab_size": 67, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
SPEECH = {
    "vocab_size": 20, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64,
    "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2, "layerdrop": 0.0,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False,
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0,
    "final_dropout": 0.0,
}  # fmt: skip
JAMBA = {
    "vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager",
    "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
    "use_mamba_kernels": False, "output_router_logits": True,
    "router_aux_loss_coef": 0.1, "mamba_d_state": 4, "pad_token_id": 0,
}  # fmt: skip
PROPHET = {
    "vocab_size": 67, "hidden_size": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_encoder_layers": 1,
    "num_decoder_layers": 1, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "ngram": 2,
    "max_position_embeddings": 64, "dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0,
}  # fmt: skip
PERCEIVER = {
    "vocab_size": 67, "d_model": 16, "num_latents": 4, "d_latents": 16, "num_blocks": 1, "qk_channels": 16,
    "num_self_attends_per_block": 1, "num_self_attention_heads": 2, "num_cross_attention_heads": 2,
    "max_position_embeddings": 8, "v_channels": 16, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
VIT = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 16,
    "patch_size": 4, "encoder_stride": 4, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
IDS = torch.arange(32).view(4, 8) % 60 + 3
IGNORED = IDS.masked_fill(torch.arange(32).view(4, 8) % 7 < torch.tensor([[5], [4], [1], [0]]), -100)


def made(name, sizes):
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    return kind(kind.config_class(**sizes)).double().train()


def check_dp(name, sizes, given, axes=None, **options):
    """Loss and gradients are those of the batch of all ranks."""
    mesh = mesh_of(Grid(dp=2, **axes or {}))
    options = {"scheme": "3d" if axes else "1d"} | options
    dense, model = made(name, sizes), ndtp.parallelize(made(name, sizes), mesh, **options)
    mine = {key: value.chunk(2)[mesh.coordinate["dp"]] for key, value in given.items()}
    expected, found = dense(**given).loss, model(**mine).loss
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, msg=lambda m: f"{name}: {m}")
    expected.backward(), found.backward()
    for (key, p), q in zip(model.named_parameters(), dense.parameters(), strict=True):
        if q.grad is not None:
            ours = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            torch.testing.assert_close(ours, q.grad, rtol=1e-5, atol=1e-7, msg=lambda m: f"{name}, {key}: {m}")  # noqa: B023


def check_terms():
    labels = {"labels": IGNORED, "next_sentence_label": torch.tensor([0, 1, 1, 0])}
    check_dp("BertForPreTraining", BERT, {"input_ids": IDS} | labels, keep=["cls.seq_relationship"])
    of_tokens = {"input_ids": IDS, "labels": IGNORED.clamp(max=2)}
    check_dp("BertForTokenClassification", BERT | {"num_labels": 3}, of_tokens, keep=["classifier"])
    one_side = of_tokens | {"labels": of_tokens["labels"].index_fill(0, torch.tensor([0, 1]), -100)}
    check_dp("BertForTokenClassification", BERT | {"num_labels": 3}, one_side, keep=["classifier"])
    waves = {"input_values": torch.linspace(-1, 1, 800).double().sin().view(4, 200), "labels": IDS[:, :4] % 19 + 1}
    check_dp("Wav2Vec2ForCTC", SPEECH, waves)
    padded = waves | {"labels": waves["labels"].masked_fill(IGNORED[:, :4] < 0, -100)}
    check_dp("Wav2Vec2ForCTC", SPEECH | {"ctc_zero_infinity": True}, padded)
    check_dp("ProphetNetForConditionalGeneration", PROPHET, {"input_ids": IDS, "labels": IDS})
    check_dp("PerceiverForMaskedLM", PERCEIVER, {"inputs": IDS, "labels": IDS})
    check_dp("JambaForCausalLM", JAMBA, {"input_ids": IDS, "labels": IGNORED})


@torch.no_grad()
def check_evaluation():
    """Of ranks with few and with many rows, whose classifier is split: in the model's loss and in the user's own."""
    mesh, sizes = mesh_of(Grid(dp=2)), BERT | {"num_labels": 3}
    dense, model = made("BertForTokenClassification", sizes), made("BertForTokenClassification", sizes)
    ndtp.parallelize(model, mesh, scheme="1d").eval()
    ids = torch.arange(96).view(12, 8) % 60 + 3
    labels = (ids % 3).masked_fill(torch.arange(96).view(12, 8) % 5 == 0, -100)
    here = slice(0, 3) if mesh.rank == 0 else slice(3, 12)
    expected = dense.eval()(input_ids=ids, labels=labels).loss
    out = model(input_ids=ids[here], labels=labels[here])
    own = F.cross_entropy(out.logits.flatten(0, 1), labels[here].flatten())
    torch.testing.assert_close((out.loss, own), (expected, expected))


def check_refused():
    mesh = mesh_of(Grid(dp=2))
    model = ndtp.parallelize(made("BertForQuestionAnswering", BERT), mesh, scheme="1d", keep=["qa_outputs"])
    places = {"start_positions": torch.tensor([1, 2, 9, 4]), "end_positions": torch.tensor([3, 9, 9, 7])}
    given = {"input_ids": IDS} | places
    with pytest.raises(LayoutError, match=r"BertForQuestionAnswering has 2 terms.*: 1, 2, 1, 1") as caught:
        model(**{key: value.chunk(2)[mesh.rank] for key, value in given.items()})
    assert "fix: rows with as many labels on each rank" in str(caught.value)


def test_a_loss_is_that_of_all_ranks_rows(ranks):
    ranks(2).run(check_terms)
    ranks(2).run(check_evaluation)
    ranks(2).run(check_refused)


def check_split_sums():
    """A mean of numbers that ranks share, by a sum and a count of this rank's rows."""
    pixels = torch.linspace(-2, 2, 4 * 3 * 256).double().cos().view(4, 3, 16, 16)
    masked = torch.arange(16) < torch.tensor([[2], [10], [5], [16]])
    check_dp("ViTForMaskedImageModeling", VIT, {"pixel_values": pixels, "bool_masked_pos": masked}, {"z": 2})


def test_a_mean_of_what_ranks_share(ranks):
    ranks(4).run(check_split_sums)


def test_what_a_loss_is_made_of():
    x = nn.Linear(5, 5)(torch.ones(4, 5))
    target, known = torch.tensor([0, 1, -100, 2]), x.exp().mean()

    def found(loss):
        return [(term.kind, None if term.count is None else float(term.count)) for term in terms_of(loss, [known])]

    assert found(known.clone() / 2 + 3 * known) == []
    loss = known.clone()
    loss += F.cross_entropy(x, target)
    assert found(loss) == [("mean", 3)]
    assert found(F.mse_loss(x, x.detach(), reduction="sum")) == [("sum", None)]
    assert found((x.square() * 2).sum() / torch.tensor(7)) == [("mean", 7)]
    assert found(torch.stack([x.mean(), F.cross_entropy(x, target, reduction="sum")]).sum()) == [
        ("sum", None),
        ("mean", 20),
    ]
    assert {*found(F.cross_entropy(x, target, label_smoothing=0.1))} == {("mean", 3)}
    assert found(x[:1, 0].mean()) == [("mean", 1)] and found(1 - x.mean()) == [("mean", 20)]
    assert found(x.square().sum()) == [("numbers", None)] and found(x.amax()) == [("", None)]


def test_a_sum_of_unknown_numbers_is_told(ranks):
    ranks(2).run(check_warned)


def check_warned():
    mesh = mesh_of(Grid(dp=2))
    model = build("BertForMaskedLM", num_hidden_layers=1)
    model = ndtp.parallelize(model, mesh, scheme="1d", keep=["cls.predictions.decoder"])
    model.loss_function = None
    hook = next(each for each in model._forward_hooks.values() if "DataLoss" in type(each).__name__)
    x = torch.ones(3, requires_grad=True)
    with pytest.warns(UserWarning, match=re.escape("the loss of BertForMaskedLM has a sum")):
        out = hook(model, (), {}, {"loss": (x * 2).sum()})
    assert float(out["loss"].detach()) == 6
