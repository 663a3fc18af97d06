"""Models of people who never heard of ndtp: split by one call, equal to dense, hidden states split between layers."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from models_from_elsewhere import MODELS
from products import mesh_of
from torch import Tensor
from torch.utils._pytree import tree_leaves
from turns import by_turns

import ndtp
from ndtp import Grid
from ndtp.split import SplitTensor, whole

GRIDS = [
    ("2d", Grid(x=2, y=2)),
    ("3d", Grid(z=2, y=2)),
    ("1d-sp", Grid(x=4)),
    ("1d", Grid(x=2)),
    ("3d", Grid(dp=2, x=2)),
]
SPLIT = 0.9  # of the parameters
# By turns: each model on two grids, each grid with several models.
CASES = [(name, GRIDS[(2 * i + k) % len(GRIDS)]) for i, name in enumerate(MODELS) for k in range(2)]


def scalar(out: object) -> Tensor:
    results = [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.requires_grad]
    return sum((whole(x) * torch.arange(float(x.numel())).view(x.shape).cos()).sum() for x in results)


def check_model(name: str, scheme: str, grid: Grid) -> str:
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    dense = make()
    expected = dense(*inputs())
    loss = scalar(expected)
    loss.backward()
    torch.manual_seed(0)
    mesh = mesh_of(grid)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # nothing is gathered for want of a rule
        model = ndtp.parallelize(make(), mesh, scheme=scheme)
        mine = model(*inputs())
        scalar(mine).div(grid["dp"] if "dp" in grid else 1).backward()
    for ours, theirs in zip(tree_leaves(mine), tree_leaves(expected), strict=True):
        torch.testing.assert_close(whole(ours), theirs, rtol=1e-4, atol=1e-5)
    for (key, ours), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
        full = ours.grad.full_tensor()[tuple(map(slice, theirs.shape))]
        torch.testing.assert_close(full, theirs.grad, rtol=1e-3, atol=1e-4, msg=lambda text, key=key: f"{key}: {text}")
    report = model.ndtp_report
    assert ("divide a mean" in report.losses) == ("dp" in grid), report.losses
    total, split, _ = report.parameters
    assert split >= SPLIT * total, report
    assert report.linears[1] >= SPLIT * report.linears[0] - 1, report
    return str(report)


@pytest.mark.parametrize(
    ("name", "on"), by_turns(CASES, 3), ids=lambda case: case if isinstance(case, str) else f"{case[0]} {case[1]}"
)
def test_equals_dense(ranks, name, on):
    scheme, grid = on
    texts = ranks(grid.num_ranks).run(check_model, name, scheme, grid)
    assert len(set(texts)) == 1


class Holder(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> object:
        return self.inner(input_ids=input_ids, labels=labels)


def check_bytes() -> tuple[int, int]:
    """The same Llama, recognised and observed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    words = torch.randint(96, (4, 8), generator=torch.Generator().manual_seed(0))
    taken = []
    for is_wrapped in (False, True):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=96, num_hidden_layers=2, use_cache=False, **sizes))
        model = Holder(model) if is_wrapped else model
        ndtp.parallelize(model, mesh_of(Grid(x=2, y=2)), scheme="2d")
        with ndtp.CommMeter() as meter:
            out = model(words, labels=words)
            assert isinstance(out.logits, SplitTensor) == is_wrapped and out.logits.is_open, "no logits are computed"
            out.loss.backward()
        taken.append(meter.volume.total)
    return tuple(taken)


def test_what_is_observed_moves_no_more_than_what_is_recognised(ranks):
    recognised, observed = ranks(4).run(check_bytes)[0]
    assert observed <= 1.1 * recognised, (recognised, observed)


def check_ways() -> dict[str, tuple[str, bool]]:
    """By family: which way a tiny model was split, and whether nearly all of it is."""
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4}
    found = {}
    for family in ("Llama", "DiffLlama"):
        config = getattr(transformers, f"{family}Config")(vocab_size=64, num_hidden_layers=1, **sizes)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        report = ndtp.parallelize(model, mesh_of(Grid(x=2)), scheme="1d").ndtp_report
        total, split, _ = report.parameters
        found[family] = type(report.split).__name__, split > 0.95 * total
    return found


def test_a_stock_model_of_which_much_would_stay_whole_is_observed(ranks):
    """DiffLlama's code combines heads, so that its attention is none that runs on those of one rank."""
    found = ranks(2).run(check_ways)[0]
    assert found == {"Llama": ("Split", True), "DiffLlama": ("AnyModel", True)}


class Directions(torch.nn.Module):
    """Rows of length one: what a row of padding would be is no number, and has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = torch.nn.Embedding(8, 8), torch.nn.Linear(8, 8, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        y = self.out(self.words(ids))
        return y / y.square().sum(-1, keepdim=True).sqrt() + y.abs().log()


def check_padded() -> None:
    torch.manual_seed(0)
    dense = Directions()
    model = ndtp.parallelize(copy.deepcopy(dense), mesh_of(Grid(x=2, y=2)), scheme="2d")
    ids = torch.arange(3)[:, None]
    for each in (dense, model):
        scalar(each(ids)).backward()
    for ours, theirs in zip(model.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def test_padding_gives_no_gradient(ranks):
    """Three rows on four ranks."""
    ranks(4).run(check_padded)


def check_names() -> bool:
    """A layer takes its input by the name that its own class has for it, and by no other."""
    mesh = mesh_of(Grid(x=2))
    for layer, name in ((torch.nn.RMSNorm(8), "x"), (torch.nn.Linear(8, 8), "input")):
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), layer, torch.nn.Linear(8, 8))
        x = torch.randn(4, 8)
        expected = copy.deepcopy(model)(x)
        ndtp.parallelize(model, mesh, scheme="1d-sp", example=x)
        hidden = model[0](input=x)
        torch.testing.assert_close(whole(model[2](model[1](**{name: hidden}))), expected)
        for named in ({"inptu": hidden}, {name: hidden, "scale": hidden}):
            with pytest.raises(TypeError):
                model[1](**named)
        with pytest.raises(TypeError):
            model[1](hidden, scale=hidden)
    return True


def test_layers_are_called_by_their_own_names(ranks):
    assert all(ranks(2).run(check_names))
