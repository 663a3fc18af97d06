"""`ndtp plan`, as it is typed."""

import json

import pytest
from rich.cells import cell_len

from ndtp import Grid, Layout
from ndtp.algebra.schemes import block_layouts
from ndtp.planner.model_config import read_config
from ndtp.planner.scaling import rank_counts, scaling
from ndtp.planner.search import plan

SIZES = ("--tokens", "8192", "--hidden", "4096", "--ffn", "16384", "--ranks", "64")

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None}


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


def test_constraints_reach_the_search(ndtp):
    words = ("--fix", "dp=2,z=4", "--tp-within-node", "--no-pad", "--dtype", "fp32", "--optimizer", "none")
    code, out, _ = ndtp("plan", *SIZES, *words, "--memory-limit", "70", "--json", "-")
    assert code == 0
    for each in json.loads(out)["plans"]:
        assert (each["grid"]["dp"], each["grid"]["z"]) == (2, 4)
        assert each["grid"]["x"] * each["grid"]["y"] <= 8


@pytest.mark.parametrize("config, layers, gated, kv_heads", [(LLAMA, 32, True, 8), (GPT2, 12, False, 12)])
def test_model_by_its_config(ndtp, tmp_path, config, layers, gated, kv_heads):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    sizes = read_config(tmp_path)
    assert (sizes.layers, sizes.gated, sizes.kv_heads) == (layers, gated, kv_heads)
    assert sizes.ffn == config.get("intermediate_size", 4 * 768)
    code, out, _ = ndtp("plan", "--model", str(path), "--tokens", "8192", "--ranks", "8", "--json", "-")
    assert code == 0
    result = json.loads(out)
    assert [block["name"] for block in result["request"]["blocks"]] == ["attention", "gated mlp" if gated else "mlp"]
    assert result["request"]["layers"] == layers
    code, out, _ = ndtp("plan", "--model", str(path), "--tokens", "8192", "--ranks", "8")
    module = "GatedMLP(4096, 14336" if gated else "MLP(768, 3072"
    assert code == 0 and f"block = ndtp.nn.{module}, mesh=mesh, scheme=" in out


@pytest.mark.parametrize(
    "config, message",
    [
        ({**LLAMA, "hidden_size": None}, "lacks a size; one of hidden_size, n_embd"),
        ({**LLAMA, "intermediate_size": "big"}, "intermediate_size='big'; it must be an integer from 1"),
        ({**LLAMA, "num_local_experts": 8}, "mixture-of-experts"),
        ([1], "holds no JSON object"),
    ],
)
def test_bad_configs(ndtp, tmp_path, config, message):
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
        ((*SIZES[:-1], "0"), "ranks=0"),
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
