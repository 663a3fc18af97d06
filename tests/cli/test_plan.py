"""`ndtp plan`, as it is typed."""

import json
from dataclasses import replace

import pytest
from rich.cells import cell_len

from ndtp import Grid, Layout
from ndtp.algebra.schemes import block_layouts
from ndtp.algebra.wire import Wire
from ndtp.planner.block_cost import Block
from ndtp.planner.hardware import Hardware
from ndtp.planner.model_config import read_config, sizes_of
from ndtp.planner.request import Request
from ndtp.planner.scaling import rank_counts, scaling
from ndtp.planner.search import plan, search

SIZES = ("--tokens", "8192", "--hidden", "4096", "--ffn", "16384", "--ranks", "64")

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None, "vocab_size": 50257,
    "architectures": ["GPT2LMHeadModel"],
}  # fmt: skip
BART = {
    "model_type": "bart", "d_model": 64, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 1000,
}  # fmt: skip


@pytest.fixture
def without_transformers(monkeypatch):
    monkeypatch.setattr("ndtp.models.counted.is_installed", lambda: False)


def test_table_fits_100_columns(ndtp):
    code, out, _ = ndtp("plan", *SIZES, "--objective", "volume", "--layers", "80")
    assert code == 0
    assert max(map(cell_len, out.splitlines())) <= 100
    assert "10 of 84 grids of 64 ranks by volume, on h100-ib" in out
    assert "3.71 times less than 1D" in out


def test_json_schema(ndtp):
    code, out, err = ndtp("plan", *SIZES, "--objective", "volume", "--json", "-", "--top", "5")
    assert code == 0 and "grids of 64 ranks" in err
    result = json.loads(out)
    assert len(result["plans"]) == len(result["use"]) == 5
    for each in result["plans"]:
        assert set(each) == {"grid", "volume_bytes", "step_ms", "memory_bytes", "bound_ratio", "why"}
        assert set(each["grid"]) == {"dp", "z", "x", "y"}
    best, use = result["plans"][0], result["use"][0]
    assert best["volume_bytes"] == 68 * 2**20
    assert list(best["grid"]) == use["rank_order"]
    # What it says can be used as it stands.
    layouts = block_layouts(Grid(best["grid"]), use["scheme"])
    assert isinstance(layouts.input, Layout)


def test_a_wire(ndtp):
    code, out, err = ndtp("plan", *SIZES, "--wire", "weights=fp8,gradients=int8", "--json", "-")
    result = json.loads(out)
    assert code == 0 and "wire='weights=fp8_e4m3" in err.replace("\n", "") and "In fewer bytes (--wire)" in err
    assert result["use"][0]["wire"] == result["request"]["wire"]
    assert Wire.of(result["request"]["wire"]) == Wire.of({"weights": "fp8", "gradients": "int8"})
    assert [each["wire"] for each in result["wires"]] == [None, "fp8", "int8"]
    assert result["wires"][0]["volume_bytes"] > result["plans"][0]["volume_bytes"] > result["wires"][1]["volume_bytes"]


def test_constraints_reach_the_search(ndtp):
    words = ("--fix", "dp=2,z=4", "--tp-within-node", "--no-pad", "--dtype", "fp32", "--optimizer", "none")
    code, out, _ = ndtp("plan", *SIZES, *words, "--memory-limit", "70", "--json", "-")
    assert code == 0
    for each in json.loads(out)["plans"]:
        assert (each["grid"]["dp"], each["grid"]["z"]) == (2, 4)
        assert each["grid"]["x"] * each["grid"]["y"] <= 8


@pytest.mark.parametrize("config, layers, gated, kv_heads", [(LLAMA, 32, True, 8), (GPT2, 12, False, 12)])
def test_model_by_its_config(ndtp, tmp_path, monkeypatch, config, layers, gated, kv_heads):
    """Counted in the model that transformers builds, and read in the config alone, without it: the same."""
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    (stack,) = read_config(tmp_path).stacks
    assert (stack.layers, stack.gated, stack.kv_heads) == (layers, gated, kv_heads)
    assert stack.ffn == config.get("intermediate_size", 4 * 768)
    words = ("--tokens", "8192", "--sequence", "1024", "--ranks", "8", "--json", "-")
    code, out, said = ndtp("plan", "--model", str(path), *words)
    assert code == 0
    blocks = json.loads(out)["request"]["blocks"]
    assert [(block["name"], block["times"]) for block in blocks] == [
        ("attention", layers), ("gated mlp" if gated else "mlp", layers), ("vocabulary", 1)
    ]  # fmt: skip
    best = json.loads(out)["plans"][0]["grid"]
    model = json.loads(out)["model"]
    assert model["counted"] == "in the model" and f"\n  {layers} x attention: " in said
    # transformers may have logged before it.
    assert f"{model['name']}, {model['parameters'] / 1e6:,.0f} million parameters" in said.splitlines()
    assert sum(model["not_planned"].values()) == model["parameters"] - model["planned_parameters"]
    axes = ", ".join(f"{axis}={size}" for axis, size in best.items() if size > 1)
    assert f"mesh = ndtp.ProcessGrid(ndtp.Grid({axes}))" in said
    assert "model = ndtp.parallelize(dense(), mesh, scheme=" in said
    monkeypatch.setattr("ndtp.models.counted.is_installed", lambda: False)
    code, other, said = ndtp("plan", "--model", str(path), *words)
    assert code == 0 and said.startswith(f"{config['model_type']}, ") and "by the config alone" in said
    alone = json.loads(other)
    assert alone["model"]["planned_parameters"] == model["planned_parameters"]
    assert (alone["plans"], alone["request"]) == (json.loads(out)["plans"], json.loads(out)["request"])


def test_other_layers_than_the_config_has(ndtp, tmp_path, without_transformers):
    path = tmp_path / "config.json"
    for config, times in ((LLAMA, [5, 5, 1]), (BART, [5, 5, 5, 5, 5, 5, 1]), ({"text_config": LLAMA}, [5, 5, 1])):
        path.write_text(json.dumps(config))
        words = ("--model", str(path), "--batch", "16", "--sequence", "512", "--ranks", "8", "--layers", "5")
        words += ("--objective", "volume", "--json", "-")
        code, out, _ = ndtp("plan", *words)
        blocks = json.loads(out)["request"]["blocks"]
        assert code == 0 and [block["times"] for block in blocks] == times
        assert {block["tokens"] for block in blocks} == {8192}
    path.write_text(json.dumps({"model_type": "llama"}))
    code, _, err = ndtp("plan", *words)
    assert code == 2 and "names no number of layers, such as num_hidden_layers; leave --layers out" in err


def test_both_stacks_and_the_vocabulary_count(tmp_path):
    """An encoder-decoder has two stacks, of which one attends to the other; a tied embedding is one matrix."""
    (tmp_path / "config.json").write_text(json.dumps(BART))
    sizes = read_config(tmp_path)
    encoder, decoder = sizes.stacks
    assert (encoder.layers, decoder.layers, encoder.crosses, decoder.crosses) == (2, 3, False, True)
    layer = 4 * 64**2 + 2 * 64 * 256
    assert sizes.parameters == 2 * layer + 3 * (layer + 4 * 64**2) + 1000 * 64
    untied = sizes_of(BART | {"tie_word_embeddings": False})
    assert untied.parameters == sizes.parameters + 1000 * 64
    body = sizes_of(BART | {"architectures": ["BartModel"]})
    assert not body.head and body.parameters == sizes.parameters
    assert body.blocks(8)[-1].bounds == () and sizes.blocks(8)[-1].bounds == ((8, 64, 1000),)


def test_a_nested_text_part_is_planned_and_the_rest_is_named(ndtp, tmp_path, without_transformers):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llava", "text_config": LLAMA, "vision_config": {"hidden_size": 8}}))
    code, out, _ = ndtp("plan", "--model", str(path), "--tokens", "8192", "--ranks", "8")
    assert code == 0 and "not counted: vision_config" in out


def test_time_and_memory_of_repeated_blocks_are_those_of_layers():
    """`times` on the blocks or `layers` on the request: the same work."""
    block = Block.mlp(8192, 4096, 16384)
    hardware = Hardware.load("h100-ib")
    one = search(Request((block,), 8, hardware, layers=5))
    other = search(Request((replace(block, times=5),), 8, hardware))
    facts = [[(p.grid, p.step_ms, p.volume_bytes, p.memory_bytes, p.bound_ratio, p.why) for p in each]
             for each in (one, other)]  # fmt: skip
    assert facts[0] == facts[1]


@pytest.mark.parametrize(
    "config, message",
    [
        ({**LLAMA, "hidden_size": None}, "lacks a size; one of hidden_size, n_embd"),
        ({**LLAMA, "intermediate_size": "big"}, "intermediate_size='big'; it must be an integer from 1"),
        ({**LLAMA, "num_local_experts": 8}, "mixture-of-experts"),
        ({**LLAMA, "model_type": "swin"}, "model_type='swin' is no family whose layers are known"),
        ({**LLAMA, "model_type": None}, "or give the sizes of its MLP with --hidden, --ffn and"),
        ({**LLAMA, "architectures": 3}, "architectures=3; it must be a list of names"),
        ([1], "holds no JSON object"),
    ],
)
def test_bad_configs(ndtp, tmp_path, without_transformers, config, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    code, _, err = ndtp("plan", "--model", str(path), "--tokens", "8192", "--ranks", "8")
    assert code == 2 and message in err


@pytest.mark.parametrize(
    "words, message",
    [
        ((*SIZES, "--fix", "x=3"), "63 or 66 ranks"),
        ((*SIZES, "--fix", "x"), "'x' is not an axis and its size; write it like z=2,x=2,y=2; axes: dp z x y"),
        ((*SIZES, "--objective", "speed"), "objective='speed'; it must be one of time, volume, memory"),
        ((*SIZES, "--hardware", "h101-ib"), "did you mean h100-ib"),
        ((*SIZES, "--model", "none.json"), "leave them out"),
        (("--model", "none.json", "--tokens", "1", "--ranks", "1"), "does not exist"),
        (("--tokens", "1", "--ranks", "1"), "give --hidden and --ffn, or --model"),
        ((*SIZES[:-1], "7", "--no-pad"), "fix: 4 or 8 ranks"),
        ((*SIZES[:-1], "0"), "'--ranks': 0; it must be an integer of at least 1"),
        ((*SIZES, "--plot", "/no/such/folder/a.png"), "does not exist"),
    ],
)
def test_wrong_use_exits_2_and_says_what_would_work(ndtp, words, message):
    code, _, err = ndtp("plan", *words)
    assert code == 2
    assert message in err


def test_help_has_an_example(ndtp):
    code, out, _ = ndtp("plan", "--help")
    assert code == 0 and "Example: ndtp plan --tokens 8192" in out
    assert max(map(cell_len, out.splitlines())) <= 100


def test_plot_is_a_picture(ndtp, tmp_path):
    code, _, _ = ndtp("plan", *SIZES, "--plot", str(tmp_path / "plan.png"))
    assert code == 0
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_what_the_plot_shows():
    request = plan(8192, 4096, 16384, 64)[0].request
    curves = scaling(request, rank_counts(64))
    assert rank_counts(24) == [1, 2, 4, 8, 16, 24]
    volume = {name: {p.ranks: p.volume_bytes / 2**20 for p in points} for name, points in curves.families.items()}
    assert (volume["1D"][4], volume["2D"][4], volume["3D"][64], volume["best"][8]) == (192, 320, 68, 160)
    assert 2 not in volume["3D"] and 2 not in volume["2D"]
    for points in curves.families.values():
        for point in points:
            floor = next(p for p in curves.bound if p.ranks == point.ranks)
            assert point.volume_bytes >= floor.volume_bytes * (1 - 1e-9)
            assert point.step_ms >= floor.step_ms
