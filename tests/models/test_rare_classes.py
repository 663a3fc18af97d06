"""Stock classes whose code does what few others do: losses that only some labels keep finite, rounding, writes in
place."""

from __future__ import annotations

import warnings

import pytest
import torch
from products import mesh_of
from torch import Tensor, nn

import ndtp
from ndtp import Grid

pytest.importorskip("transformers")
import transformers
import transformers.modeling_layers
import transformers.modeling_utils  # so that ranks are forked with it

SMALL = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
OFF = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout_prob": 0.0}
IDS = torch.arange(16).view(2, 8) * 5 % 23 + 12  # none of them a token of images


def stock(kind: str, config: str, **sizes: object) -> nn.Module:
    torch.manual_seed(0)
    return getattr(transformers, kind)(getattr(transformers, config)(**SMALL | sizes))


def chameleon() -> tuple[nn.Module, dict[str, Tensor]]:
    """Scores of image tokens are set to the least number there is: the loss is finite for labels that are none."""
    vision = {"base_channels": 32, "channel_multiplier": [1, 1], "latent_channels": 32, "embed_dim": 12}
    words = {"<image>": 11} | {f"IMGIMG{'ABCDEFGH'[i]}Z": 3 + i for i in range(8)}
    model = stock(
        "ChameleonForConditionalGeneration", "ChameleonConfig", num_key_value_heads=2, vocabulary_map=words,
        vq_config=vision | {"num_embeddings": 8, "resolution": 16, "num_res_blocks": 1},
    )  # fmt: skip
    return model, {"input_ids": IDS, "labels": IDS}


def bros() -> tuple[nn.Module, dict[str, Tensor]]:
    """Links between tokens: scores of links from a token to itself are the least number there is."""
    model = stock("BrosSpadeELForTokenClassification", "BrosConfig", hidden_size=64, **OFF)
    boxes = torch.linspace(0, 1, 2 * 8 * 8).view(2, 8, 8)
    labels = (torch.arange(8) + 3).expand(2, 8) % 8
    firsts, ones = torch.ones(2, 8, dtype=torch.bool), torch.ones(2, 8)
    return model, {
        "input_ids": IDS,
        "bbox": boxes,
        "labels": labels,
        "bbox_first_token_mask": firsts,
        "attention_mask": ones,
    }


def big_bird() -> tuple[nn.Module, dict[str, Tensor]]:
    """Probabilities of blocks are written into a tensor of zeros, by slices and by `scatter_` on views of it."""
    model = stock(
        "BigBirdForMaskedLM", "BigBirdConfig", attention_type="block_sparse", block_size=2, num_random_blocks=1,
        max_position_embeddings=64, **OFF,
    )  # fmt: skip
    ids = torch.arange(2 * 24).view(2, 24) * 7 % 40
    return model, {"input_ids": ids, "labels": ids}


def found(model: nn.Module, given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    transformers.set_seed(0)  # that of NumPy, too, by which random blocks are drawn
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of what is gathered
        loss = model(**given, **({"output_attentions": True} if "BigBird" in type(model).__name__ else {})).loss
        loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}


def split(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return ndtp.parallelize(model, mesh_of(Grid(x=2)), scheme="1d-sp")


def check(make: object) -> None:
    (dense, given), (model, _) = make(), make()
    expected, theirs = found(dense, given)
    loss, mine = found(split(model), given)
    assert expected.isfinite() and expected > 0.1, "a loss that says something"
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0.0)
    assert mine.keys() == theirs.keys()
    largest = max(float(g.abs().max()) for g in theirs.values())
    for name, grad in theirs.items():
        torch.testing.assert_close(mine[name], grad, rtol=1e-4, atol=1e-5 * largest, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("make", [chameleon, bros, big_bird], ids=lambda f: f.__name__)
def test_equal_to_dense(make: object, ranks) -> None:
    ranks(2).run(check, make)


def check_rounding() -> None:
    """IBert rounds to 8 bits: one that falls to the other side is a whole unit, in dense fp32 as well as on a grid."""
    make = lambda: stock("IBertForMaskedLM", "IBertConfig", quant_mode=True, **OFF)  # noqa: E731
    given = {"input_ids": IDS, "labels": IDS}
    exact, theirs, mine = (found(m, given) for m in (make().double(), make(), split(make())))
    for name in exact[1]:
        scale = max(float(exact[1][name].abs().max()), 1e-3 * max(float(g.abs().max()) for g in exact[1].values()))
        off, own = (float((g[1][name].double() - exact[1][name]).abs().max()) / scale for g in (mine, theirs))
        assert off <= 1.2 * own + 1e-5, f"{name}: {off:.2g} from fp64, the dense model {own:.2g}"
        torch.testing.assert_close(mine[1][name], theirs[1][name], rtol=0.0, atol=1e-4 * scale, msg=name)
    torch.testing.assert_close(mine[0], theirs[0], rtol=1e-5, atol=0.0)


def test_rounding(ranks) -> None:
    ranks(2).run(check_rounding)
