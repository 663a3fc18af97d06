"""How models are counted, by a sample of `real_models.py`: other families every day, at settings drawn anew."""

import json
import random
from datetime import date
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from odd_settings import cases, kinds
from real_models import alone

from ndtp.errors import GridError
from ndtp.planner.model_config import READ, read_file, sizes_of
from ndtp.planner.model_families import families

DAY = date.today().toordinal()
ALWAYS = ["falcon", "t5"]  # more forms of their layers than others
A_DAY = 6  # of all classes of configs, in an order without pattern, so that each has its turn


def of_today():
    order = sorted(kinds())
    random.Random(0).shuffle(order)
    return [*ALWAYS, *(order[(DAY * A_DAY + i) % len(order)] for i in range(A_DAY))]


@pytest.mark.parametrize("kind", of_today())
def test_counts_are_those_of_the_model(kind):
    """Blocks as torch counts the model's products; by the config alone the same blocks, or a refusal."""
    pick = random.Random(DAY)
    for case in cases(kind, kinds()[kind], seed=DAY, keep=lambda changed: not changed or pick.random() < 0.3):
        if case.blocks is not None:
            assert not case.problem, f"{case.file}: {case.problem}"
        told = alone(case, families())
        assert told in ("same", "refused"), f"{case.file}: {told}"


def test_fields_that_a_file_leaves_out_are_those_of_the_class():
    """Heads of cwm have 128 features where a file does not say; null is no silence."""
    small = {"model_type": "cwm", "hidden_size": 2304}
    for file, size in ((small, 128), (small | {"head_dim": None}, 48)):
        attention, *_ = sizes_of(file).blocks(1)
        assert attention.outs[0] == 48 * size


def test_the_record():
    """Nothing differs in the whole comparison, as `real_models.py --record` wrote it; each class names its commit."""
    record = json.loads((Path(__file__).parents[2] / "bench" / "results" / "model_counts.json").read_text())
    totals, rows = record["totals"], record["rows"]
    assert (
        totals["differ"] == totals["alone_differ"] == 0 and totals["counted"] + totals["refused"] == totals["settings"]
    )
    assert totals["config_classes"] == len(rows) > 800 and all(row["commit"] and row["date"] for row in rows.values())
    assert {kind for kind, row in rows.items() if row["alone_same"]} <= families().keys()


def test_the_table():
    known = families()
    assert {"bert", "roberta", "vit", "llama", "gpt2", "t5", "llava", "xlm-roberta"} <= known.keys()
    assert {kind for kind, family in known.items() if family.pair} >= {"bart", "t5", "m2m_100"}
    assert {"mixtral", "deepseek_v3", "qwen3_moe"} <= {kind for kind, family in known.items() if family.mixture}
    assert all(family.defaults.keys() <= READ for family in known.values())


@pytest.mark.parametrize("kind", ["swin", "albert", "mamba", "gpt_oss", "switch_transformers"])
def test_what_is_built_otherwise_is_refused_by_name(kind):
    with pytest.raises(GridError, match=rf"model_type='{kind}'.*\n  fix: pip install --upgrade transformers"):
        sizes_of({"model_type": kind})


def test_a_field_that_is_not_read_is_refused_by_name():
    with pytest.raises(GridError, match="add_cross_attention of model_type='bert' is not known by the config alone"):
        sizes_of({"model_type": "bert", "is_decoder": True, "add_cross_attention": True})
    with pytest.raises(GridError, match="use_swiglu_ffn=True of model_type='dinov2'; by the config alone"):
        sizes_of({"model_type": "dinov2", "use_swiglu_ffn": True})


def test_heads_that_do_not_divide_the_hidden_size_are_refused():
    """But for classes whose own defaults are such."""
    with pytest.raises(GridError, match="17 heads do not divide a hidden size of 1024, and nothing gives their size"):
        sizes_of({"model_type": "bart", "encoder_attention_heads": 17})
    # Pixtral's config has a head size of its own, the quotient rounded down.
    with pytest.raises(GridError, match="17 heads do not divide a hidden size of 512"):
        sizes_of({"model_type": "pixtral", "hidden_size": 512, "num_attention_heads": 17})
    with pytest.raises(GridError, match="6 heads do not divide a hidden size of 385"):
        sizes_of({"model_type": "dinov3_vit", "hidden_size": 385})
    attention, *_ = sizes_of({"model_type": "glm4v_moe_text"}).blocks(1)
    assert (attention.hidden, attention.outs[0]) == (4096, 96 * 42)


def test_infinite_numbers_of_a_config(tmp_path):
    """Transformers writes them as objects, which JSON has no other form for."""
    transformers = pytest.importorskip("transformers")
    transformers.Mamba2Config().save_pretrained(tmp_path)
    assert read_file(tmp_path)[0]["time_step_limit"] == [0.0, float("inf")]
