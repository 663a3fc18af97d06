"""Layers that compute a parameter from others, by hooks or a parametrization, train as the dense ones do.

They may do so before `parallelize` or begin to do so after it.
"""

import pytest
import torch
from architectures import build
from products import mesh_of
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm

import ndtp
from ndtp import Grid

KINDS = {
    "weight_norm": weight_norm,
    "spectral_norm": spectral_norm,
    "parametrized weight_norm": parametrizations.weight_norm,
    "pruned weights": lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
    "pruned rows": lambda layer: prune.ln_structured(layer, "weight", 0.25, 2, 0),
    "pruned bias": lambda layer: prune.l1_unstructured(layer, "bias", 0.5),
}
IDS = torch.arange(32).view(4, 8) * 5 % 24


class Net(nn.Module):
    """A table, an MLP, a norm, and a head whose two features are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(24, 32), nn.LayerNorm(32)
        self.up, self.down, self.head = nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        return self.head(self.norm(x + self.down(torch.relu(self.up(x)))))


class Torchs(Net):
    """The same, with a layer of torch's before."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Sequential(
            nn.Embedding(24, 32), nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        )


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return {"Net": Net, "Torchs": Torchs}.get(name, lambda: build(name))().double()


def computed(model: nn.Module, kind: str, of: str) -> nn.Module:
    torch.manual_seed(1)
    for layer in list(model.modules()):
        if type(layer).__name__ == of and (kind != "pruned bias" or layer.bias is not None):
            KINDS[kind](layer)
    return model


def trained(model: nn.Module) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
    for _ in range(3):
        optimizer.zero_grad()
        given = model(IDS)
        loss = getattr(given, "logits", given).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def check(name: str, of: str, kinds: list[str]) -> None:
    mesh, given = mesh_of(Grid(x=2, y=2)), {} if name == "LlamaForCausalLM" else {"example": IDS}
    for kind in kinds:
        expected = trained(computed(made(name), kind, of))
        before = ndtp.parallelize(computed(made(name), kind, of), mesh, **given)
        whole = [key for key, p in before.named_parameters() if not isinstance(p, DTensor)]
        assert not whole, (kind, whole)
        after = computed(ndtp.parallelize(made(name), mesh, **given), kind, of)
        for when, model in (("before", before), ("after", after)):
            assert trained(model) == pytest.approx(expected, rel=1e-4 if name == "LlamaForCausalLM" else 1e-9), (
                name,
                of,
                kind,
                when,
            )


@pytest.mark.parametrize(
    ("name", "of", "kinds"),
    [
        ("Net", "Linear", [*KINDS]),
        ("Net", "Embedding", ["weight_norm", "pruned weights", "parametrized weight_norm"]),
        ("Net", "LayerNorm", ["pruned weights"]),
        ("Torchs", "Linear", ["spectral_norm", "pruned weights"]),
        ("LlamaForCausalLM", "Linear", ["weight_norm", "pruned rows"]),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_trains_as_the_dense_model(ranks, name, of, kinds):
    ranks(4).run(check, name, of, kinds)


class Warmed(nn.Module):
    """A weight that grows with each call, as a schedule of its own has it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return weight * (self.calls / 4)


def warmed(model: nn.Module, train: bool) -> tuple[torch.Tensor, dict[str, int]]:
    """What the third call gives, and how often each weight is computed until then."""
    found, layers = {}, [(name, layer) for name, layer in model.named_modules() if "weight" in layer._parameters]
    for name, layer in layers:
        found[name] = Warmed()
        nn.utils.parametrize.register_parametrization(layer, "weight", found[name])
        found[name].calls = 0
    with torch.set_grad_enabled(train):
        for _ in range(3):
            given = model.train(train)(IDS)
    return getattr(given, "logits", given) * 1, {name: each.calls for name, each in found.items()}


def check_once() -> None:
    for name in ("Net", "GPT2LMHeadModel"):
        for train in (True, False):
            expected, once = warmed(made(name), train)
            model = ndtp.parallelize(made(name), mesh_of(Grid(x=2)), example=IDS)
            given, counts = warmed(model, train)
            assert counts == once and set(counts.values()) == {3}
            torch.testing.assert_close(given, expected)


def test_a_parametrization_that_comes_later_is_computed_once_a_call(ranks):
    """One with a state of its own, as spectral norms have it, takes as many steps as in the dense model."""
    ranks(2).run(check_once)


class Vocoder(nn.Module):
    """A convolution and a layer, whose norms are removed before inference."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mix, self.down = nn.Linear(8, 32), nn.Conv1d(4, 4, 3, padding=1), nn.Linear(32, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.mix(self.up(x))))


def removed(kind: str, is_before: bool, mesh: ndtp.ProcessGrid | None) -> torch.Tensor:
    torch.manual_seed(0)
    model, x = Vocoder().double(), torch.randn(2, 4, 8, dtype=torch.float64)

    def norms(norm: str) -> None:
        torch.manual_seed(1)
        for layer in (model.up, model.mix, model.down):
            getattr(nn.utils, norm)(layer)

    if is_before:
        norms(kind)
    if mesh is not None:
        ndtp.parallelize(model, mesh, example=x)
    if not is_before:
        norms(kind)
    model(x).square().mean().backward()
    model.eval()
    norms(f"remove_{kind}")
    return model(x) * 1


def check_removed() -> None:
    mesh = mesh_of(Grid(x=2))
    for kind in ("weight_norm", "spectral_norm"):
        for is_before in (True, False):
            torch.testing.assert_close(removed(kind, is_before, mesh), removed(kind, is_before, None))


def test_norms_of_weights_are_removed_again(ranks):
    ranks(2).run(check_removed)


class DropsWeights(nn.Module):
    """A layer whose weight another module computes for each call (Merity et al. 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.inner = nn.Linear(8, 32), nn.Linear(32, 12)
        self.raw = nn.Parameter(self.inner._parameters.pop("weight").detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inner.weight = self.raw * 1.25
        return self.inner(self.up(x))


def check_dropped() -> None:
    torch.manual_seed(0)
    dense, x = DropsWeights().double(), torch.randn(4, 8, dtype=torch.float64)
    torch.manual_seed(0)
    model = ndtp.parallelize(DropsWeights().double(), mesh_of(Grid(x=2)))
    for each in (dense, model):
        each(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), dense.parameters(), strict=True):
        grad = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
        torch.testing.assert_close(grad, theirs.grad)


def test_a_weight_that_is_set_in_each_call(ranks):
    ranks(2).run(check_dropped)


def check_report() -> None:
    model = ndtp.parallelize(
        computed(made("Net"), "weight_norm", "Linear"), mesh_of(Grid(x=2)), example=IDS, scheme="1d"
    )
    assert "computed from others" in model.ndtp_report.kept["up"]
    assert "up.weight_v" in model.ndtp_report.replaced


def test_the_report_says_why_they_are_whole(ranks):
    ranks(2).run(check_report)


def check_data() -> None:
    """Ranks whose shards an operation did not touch do not take it for a change of others alone."""
    dense = made("LlamaForCausalLM")
    model = ndtp.parallelize(made("LlamaForCausalLM"), mesh_of(Grid(x=2, y=2)))
    for each in (dense, model):
        each.lm_head.weight.data[3:5] = 0
        each(IDS)
    flat = torch.nn.utils.parameters_to_vector(model.parameters())  # which lies whole on every rank
    torch.nn.utils.vector_to_parameters(flat * 0.5, model.parameters())
    for mine, theirs in zip(model.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), theirs * 0.5)


def test_rows_may_be_written_by_their_data(ranks):
    ranks(4).run(check_data)


def check_functional() -> None:
    """Logits that are no part of a loss are computed by the weights of the call, and lead back to them."""
    for name in ("Net", "LlamaForCausalLM"):
        given = {"labels": IDS} if name == "LlamaForCausalLM" else {}
        dense, model = made(name), made(name)
        ndtp.parallelize(model, mesh_of(Grid(x=2)), scheme="1d", **({} if given else {"example": IDS}))
        for each in (dense, model):
            halves = {key: p * 0.5 for key, p in each.named_parameters()}
            out = torch.func.functional_call(each, halves, (IDS,), given)
            getattr(out, "logits", out).square().mean().backward()
        for (key, mine), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-5, atol=1e-9, msg=f"{name} {key}")


def test_logits_of_a_functional_call_have_gradients(ranks):
    ranks(2).run(check_functional)
