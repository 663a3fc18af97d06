"""The campaign `every_class.py`, on a test class such as transformers' own."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")

import elsewhere
import every_class
import every_type
import recorded
import tiny_models
import torch

COMMON = """
import a_package_that_is_not_here

class Mixin:
    def _prepare_for_class(self, given, kind, return_labels=False):
        return given | {"labels": torch.zeros(2, 5, dtype=torch.long)}

import torch
"""
OF_A_MODEL = """
import unittest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from ...test_modeling_common import Mixin
from another_package_that_is_not_here.of_it import decorated

class Tester:
    causal_lm_class = LlamaForCausalLM

    def prepare_config_and_inputs_for_common(self):
        config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_attention_heads=4,
                             num_key_value_heads=2, num_hidden_layers=1, attention_dropout=0.1)
        return config, {"input_ids": torch.randint(32, (2, 5))}

class TinyTest(Mixin, unittest.TestCase):
    all_model_classes = (LlamaModel, LlamaForCausalLM)

    def setUp(self):
        self.model_tester = Tester()

    @decorated(timeout=3)
    def test_something(self):
        ...
"""


@pytest.fixture
def tester(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    folder = tmp_path / "tests_of_transformers"
    (folder / "models" / "tiny").mkdir(parents=True)
    for package in (folder, folder / "models", folder / "models" / "tiny"):
        (package / "__init__.py").touch()
    (folder / "test_modeling_common.py").write_text(COMMON)
    (folder / "models" / "tiny" / "test_modeling_tiny.py").write_text(OF_A_MODEL)
    return list(tiny_models.testers(tiny_models.tests_at(folder), "tiny"))


def test_a_class_is_found_and_compared(tester, tmp_path):
    """Forward, backward and tokens, with tests that import packages which are not here; the bare model is a part."""
    ((case, kind),) = tester
    assert kind.__name__ == "LlamaForCausalLM"
    row = every_class.one_class(case, kind, {"x": 2}, "1d-sp", 60, str(tmp_path / "given"))
    assert row["verdict"] == "equal" and row["split"] > 0.95 and row["tokens"], row
    assert 0.0 < row["backward"] < 1e-5, row


def test_another_folder_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="is not the folder `tests`"):
        tiny_models.tests_at(tmp_path)


ONES = torch.ones(3)


@pytest.mark.parametrize(
    ("off", "of_dense", "verdict"), [(1e-6, 0.0, "equal"), (1e-3, 3e-4, "drift"), (1e-3, 1e-6, "wrong")], ids=str
)
def test_far_from_dense_is_wrong_unless_dense_with_other_last_bits_is_as_far(off, of_dense, verdict):
    dense = {"own eval logits": ONES, "own gradient of w": ONES}
    also = [{name: x + of_dense for name, x in dense.items()}]
    for name in dense:
        row = every_class.compare(dense | {name: ONES + off}, dense, also)
        assert row["verdict"] == verdict, row


def test_infinities_agree_and_tensors_that_one_has_alone_do_not():
    dense = {"own eval loss": torch.tensor([float("inf"), float("nan"), 1.0])}
    assert every_class.compare(dense, dense, [])["verdict"] == "equal"
    assert every_class.compare({"own eval loss": ONES}, dense, [])["verdict"] == "wrong"
    for less in (every_class.compare, elsewhere.compare):
        assert less({}, dense, [])["verdict"] == "wrong"
        more = less(dense | {"own gradient of w": ONES}, dense, [])
        assert more["verdict"] == "wrong" and more["worst"].endswith("dense has none")
    huge = {"own eval loss": ONES * 3e38}  # of which dense code sums two
    assert every_class.compare(huge, {"own eval loss": ONES / 0}, [])["verdict"] == "equal"
    assert every_class.compare({"own eval loss": ONES}, {"own eval loss": ONES / 0}, [])["verdict"] == "wrong"


@pytest.mark.parametrize(
    ("exact", "verdict", "asked"),
    [("equal", "equal", 2), ("wrong", "wrong", 2), ("no dense", "drift", 3)],
)
def test_a_run_in_fp64_has_the_last_word(exact, verdict, asked):
    """Where there is none, dense with its weights off by their last bit has it."""
    turns = []

    def ask(dtype, moved):
        turns.append(dtype)
        return {"verdict": exact if dtype is torch.float64 else "drift" if moved else "wrong", "split": 1.0}

    row = recorded.decided(ask)
    assert row["verdict"] == verdict and row["split"] == 1.0 and len(turns) == asked
    assert row.get("dtype") == ("float64" if asked == 2 else None)


def test_other_tokens_are_wrong_unless_their_scores_are_tied():
    scores = torch.tensor([[[0.0, 1.0, 0.5]]])
    dense = {"tokens": torch.tensor([[1]]), "scores": scores}
    other = {"tokens": torch.tensor([[2]]), "scores": torch.tensor([[[0.0, 0.5, 1.0]]])}
    assert every_class.compare(other, dense, [])["verdict"] == "wrong"
    dense["scores"] = torch.tensor([[[0.0, 1.0, 1.0 - 1e-6]]])
    assert every_class.compare(other, dense, [])["verdict"] == "equal"


def test_a_type_that_is_made_small_by_rule(ranks):
    """One of `every_type.py`, which takes all of them."""
    row = ranks(2).run(every_type.compare, "gpt2", "GPT2LMHeadModel", {"x": 2}, "1d-sp")[0]
    assert row["verdict"] == "equal" and row["split"] > 0.95, row
