"""`ndtp bench volume`, as it is typed."""

import csv
import json

import pytest
import torch
from rich.cells import cell_len

from ndtp.algebra.grid import Grid
from ndtp.measure import volume as bench
from ndtp.measure.volume import BlockShape, VolumeCase, analysis, cases, fake_group, meter, scaled_down


def test_thousands_of_ranks(ndtp):
    sizes = ("--ranks", "4096", "--tokens", "131072", "--hidden", "8192", "--ffn", "32768")
    code, out, err = ndtp("bench", "volume", *sizes, "--top", "3", "--json", "-")
    assert code == 0
    result = json.loads(out)
    assert result["ok"] and all(row["equal"] for row in result["rows"])
    assert result["rows"][0]["metered_bytes"] == 89653248
    assert {row["scheme"] for row in result["rows"]} == {"1d", "1d-sp", "2d", "3d"}
    assert max(map(cell_len, err.splitlines())) <= 100


def test_real_ranks_and_rivals(ndtp):
    code, out, err = ndtp("bench", "volume", "--ranks", "4", "--top", "2", "--compare", "--wire", "fp8", "--json", "-")
    assert code == 0
    result = json.loads(out)
    for row in result["rows"]:
        assert row["real_bytes"] == row["real_predicted_bytes"] > 0
    rivals = {rival["name"]: rival["forward_bytes"] for rival in result["rivals"]}
    assert rivals["torch Colwise/Rowwise"] == rivals["Megatron-style 1D"] == 96 * 2**20
    assert max(map(cell_len, err.splitlines())) <= 100


def test_a_row_that_differs_exits_1(ndtp, monkeypatch):
    predicted = VolumeCase.predicted
    monkeypatch.setattr(
        VolumeCase, "predicted", lambda self, shape, dtype="float64", _=None: predicted(self, shape, "float64")
    )
    monkeypatch.setattr(bench, "meter_real", lambda *_: pytest.fail("not asked for"))
    code, out, _ = ndtp("bench", "volume", "--ranks", "4", "--no-real")
    assert code == 1
    assert "NO" in out and "0 of" in out


def test_published_table():
    """MindSpore's formulae, forward, on every grid that has one."""
    shape = BlockShape(8192, 4096, 16384)
    for ranks in (4, 8, 16, 64):
        for case in cases(ranks, shape, 100):
            row = analysis(case, shape)
            assert row.forward == row.published
            assert row.computation == row.parameters == 1 / ranks
            if case.scheme == "1d":  # whole outside of the block, split inside
                assert row.activations == pytest.approx((2 * 4096 + 16384 / ranks) / (2 * 4096 + 16384))
            else:
                assert row.activations == 1 / ranks


def test_metered_by_entry_not_only_in_sum():
    shape, case = BlockShape(64, 32, 128), VolumeCase(Grid(z=2, x=2, y=2), "3d")
    with fake_group(8):
        assert meter(case, shape, torch.float32) == case.predicted(shape, 4)


def test_scaled_down_keeps_what_divides():
    assert scaled_down(BlockShape(8192, 4096, 16384), 8) == BlockShape(256, 128, 512)
    assert scaled_down(BlockShape(120, 24, 48), 24) == BlockShape(120, 24, 48)


@pytest.mark.parametrize(
    "words, message",
    [
        (("--ranks", "7"), "multiples of 7, such as 8190 x 4095 x 16380"),
        (("--ranks", "0"), "'--ranks': 0; it must be an integer from 1 to 65,536"),
        (("--dtype", "int8"), "'int8'; it must be one of bf16, fp16, fp32"),
        (("--wire", "fp4"), "'fp4' has 'fp4', which is none of bf16, fp16, fp8_e4m3, fp8_e5m2, int8, fp8; take bf16"),
    ],
)
def test_wrong_use(ndtp, words, message):
    code, _, err = ndtp("bench", "volume", *words)
    assert code == 2 and message in err


def test_help_has_an_example(ndtp):
    code, out, _ = ndtp("bench", "volume", "--help")
    assert code == 0 and "Example: ndtp bench volume" in out


LLAMA = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 9,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def test_a_whole_model(ndtp, tmp_path):
    pytest.importorskip("transformers")
    path, table, picture = (tmp_path / name for name in ("config.json", "v.csv", "v.png"))
    path.write_text(json.dumps(LLAMA))
    words = ("--model", str(path), "--ranks", "1024", "--tokens", "16384", "--sequence", "16", "--top", "1")
    code, out, err = ndtp("bench", "volume", *words, "--csv", str(table), "--plot", str(picture), "--json", "-")
    result = json.loads(out)
    assert code == 0 and result["ok"] and picture.stat().st_size > 10_000
    rows = {(row["family"], row["scheme"]): row for row in result["rows"]}
    assert {family for family, _ in rows} == {"data parallel", "FSDP", "1D", "2D", "3D"}
    lines = list(csv.DictReader(table.open()))
    assert [int(line["bytes"]) for line in lines] == [row["bytes"] for row in result["rows"] if "bytes" in row]
    for line in lines:
        parts = sum(int(size) for name, size in line.items() if name.startswith("bytes_"))
        assert parts == int(line["bytes"]) == int(line["forward_bytes"]) + int(line["backward_bytes"])
    assert "LlamaForCausalLM of transformers" in err and "1024 sequences of 16" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tokens", "8192", "--sequence", "1000"), "8192 rows are no number of sequences of 1000\n  fix: --tokens 8"),
        (("--hidden", "8"), "it gives the sizes; leave out --hidden"),
    ],
)
def test_wrong_use_of_a_model(ndtp, tmp_path, words, message):
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    code, _, err = ndtp("bench", "volume", "--model", str(path), *words)
    assert code == 2 and message in err


BERT = {"model_type": "bert", "vocab_size": 1024, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "architectures": ["BertForMaskedLM"]}  # fmt: skip


def test_sequences_are_no_longer_than_the_model_takes(ndtp, tmp_path):
    """Where the config is silent, transformers' class says it."""
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(BERT))
    words = ("bench", "volume", "--model", str(path), "--ranks", "2", "--top", "1", "--json", "-")
    code, out, _ = ndtp(*words)
    assert code == 0 and json.loads(out)["sequence"] == 512
    code, _, err = ndtp(*words, "--sequence", "1024")
    assert code == 2 and "takes no sequences of 1024" in err and "fix: --sequence 512" in err
    code, out, _ = ndtp("plan", "--model", str(path), "--ranks", "2", "--batch", "2", "--json", "-")
    assert code == 0 and json.loads(out)["request"]["sequence"] == 512
