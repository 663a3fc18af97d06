"""Plans of layers by name: what each entry means, what is refused, and that a report's plan makes the same model."""

import pytest
import torch
from models_from_elsewhere import MinimalGPT
from products import mesh_of
from test_any_model import scalar
from torch import nn
from torch.utils._pytree import tree_leaves
from turns import by_turns

import ndtp
from ndtp import Grid, Layout, LayoutError
from ndtp.models.named_plan import NamedPlan, named_layouts, schemes_in
from ndtp.split import whole


def values(plan, keep=(), scheme="3d"):
    return NamedPlan.given(plan, keep, scheme).values(MinimalGPT())


def test_the_last_entry_that_matches_a_layer_or_what_holds_it_counts():
    found = values({"h.*": "1d", "h.1": "2d", "h.*.c_fc": None, "*": "2d-features"}, keep=["lm_head"])
    assert found["h.0.attn.c_attn"] == "1d" and found["h.1.attn.c_attn"] == "2d"
    assert found["h.0.c_fc"] is None and found["h.1.c_fc"] is None and found["lm_head"] is None
    assert found["wpe"] == "2d-features", "'*' stands for what nothing else names, wherever it stands"
    only = values({"*": None, "h.0.attn": "2d"})
    assert schemes_in(only, MinimalGPT()) == {"2d"} and only["wte"] is None
    given = NamedPlan.given({"*": "2d", "h.0": "1d"}, ["wpe"], "3d").as_dict()
    assert given == {"*": "2d", "h.0": "1d", "wpe": None} == NamedPlan.given(given, (), "3d").as_dict()


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"h.*.attn.qkv": "1d"}, r"'h.\*.attn.qkv' matches no module.*\n.*'h.\*.attn.c_attn'"),
        ({"transformer.h.0.c_fc": "1d"}, r"the nearest names are .*'h.\*.c_fc'"),
        ({"h": "megatron"}, r"'h', scheme 'megatron' is not one of .*\n  fix: scheme='1d'"),
        ({"h": 3}, r"'h' as 3\n  fix: the name of a scheme"),
        ({"h.*.c_fc": "up", "h.*.c_proj": "down", "lm_head": None}, "names layers of pairs.*beside lm_head"),
        ({"h": "auto"}, "scheme 'auto' is not one of"),
    ],
)
def test_what_is_refused(plan, words):
    with pytest.raises(LayoutError, match=words):
        values(plan)


def test_layers_that_share_a_weight_are_named_alike():
    model = MinimalGPT()
    with pytest.raises(LayoutError, match=r"'wte' and 'lm_head' share a weight .*None and '2d'|'2d' and None"):
        named_layouts(NamedPlan.given({"*": "2d", "lm_head": None}, (), "3d").values(model), model, Grid(x=2), None)


def pair():
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 16))


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, use_cache=False, **sizes))


GRID = Grid(x=2, y=2)
OWN = Layout(GRID, "x", "y"), Layout(GRID, "x", "y"), Layout(GRID, "y", "x")
IDS = torch.arange(32).view(4, 8) % 64
ROWS = torch.linspace(-1, 1, 8 * 32).view(8, 32)
OBSERVED = {"h.*.attn": "1d", "h.1.c_fc": None, "h.0.c_fc": OWN, "h.1.c_proj": "2d-features"}
# By name: the model, what it is called with, the plan, the scheme of all others, and how it is split.
CASES = {
    "observed": (MinimalGPT, (IDS, IDS), OBSERVED, "2d", "AnyModel"),
    "recognised": (llama, (IDS,), {"lm_head": None}, "2d", "Split"),
    "recognised, of two schemes": (llama, (IDS,), {"*": "2d", "*.self_attn": "1d"}, "3d", "AnyModel"),
    "a pair": (lambda: pair()[:3], (ROWS,), {"*": "2d"}, "1d", "AnyModel"),
    "pairs by name": (pair, (ROWS,), {"0": "up", "2": "down", "4": (Layout(GRID, "y", "x"),) * 2}, "2d", "NoneType"),
}  # fmt: skip


TOLD = {
    "observed": (
        "h.{0-1}.attn.c_attn: A[M, K] . B[N_xy, K] -> C[M, N_xy]: no communication",
        "plan     {'*': '2d', 'h.*.attn': '1d', 'h.1.c_fc': None",
    ),
    "recognised": ("kept     lm_head: by the plan",),
}


def check_plans(names):
    mesh, told = mesh_of(GRID), {}
    for name in names:
        make, inputs, plan, scheme, kind = CASES[name]
        torch.manual_seed(0)
        dense = make()
        outs = dense(*inputs)
        expected = [x for x in tree_leaves(outs) if isinstance(x, torch.Tensor)]
        scalar(outs).backward()
        torch.manual_seed(0)
        model = ndtp.parallelize(make(), mesh, plan=plan, scheme=scheme)
        report = model.ndtp_report
        assert type(report.split).__name__ == kind, (name, report)
        torch.manual_seed(0)
        again = ndtp.parallelize(make(), mesh, plan=report.plan, axes=None)
        assert str(again.ndtp_report) == str(report), f"{name}\n{report}\n{again.ndtp_report}"
        mine = model(*inputs)
        scalar(mine).backward()
        with torch.no_grad():  # both: what is kept for a backward may be computed in other chunks
            both = mine, model(*inputs), again(*inputs)
            first, *results = [[whole(x) for x in tree_leaves(y) if isinstance(x, torch.Tensor)] for y in both]
        for ours, now, same, theirs in zip(first, *results, expected, strict=True):
            torch.testing.assert_close(
                ours, theirs, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )
            assert torch.equal(now, same), name
        for (key, ours), theirs in zip(model.named_parameters(), dense.parameters(), strict=True):
            full = ours.grad.full_tensor()
            torch.testing.assert_close(
                full, theirs.grad, rtol=1e-3, atol=1e-4, msg=lambda text, key=key, name=name: f"{name} {key}: {text}"
            )
        if name == "recognised":  # whose head the plan leaves whole; the dense model's has no bias either
            for each in (model, dense):
                each.lm_head.bias = torch.nn.Parameter(torch.linspace(0, 1, each.lm_head.out_features))
            mine, theirs = model(*inputs), dense(*inputs)
            torch.testing.assert_close(whole(scalar(mine)), scalar(theirs), rtol=1e-4, atol=1e-5)
        told[name] = str(report)
    return told


def test_models_of_a_plan_equal_dense_and_a_report_gives_its_plan_back(ranks):
    told = ranks(4).run(check_plans, by_turns(CASES, 2))[0]
    for name, lines in TOLD.items():
        assert name not in told or all(line in told[name] for line in lines), told[name]
