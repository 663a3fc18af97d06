"""`ndtp plan --model`, as it is typed: a whole training step, and the program that runs it."""

import json
import math
import re
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers

import ndtp.testing
from ndtp import CheckpointError

TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 64,
    "tie_word_embeddings": False, "max_position_embeddings": 16,
}  # fmt: skip
LARGE = TINY | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
}  # fmt: skip

MIXTRAL = TINY | {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 1,
}  # fmt: skip


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Read by the planner alone: building a model of eighty layers, even without memory, takes seconds."""
    monkeypatch.setattr("ndtp.cli.planned_model._is_for_transformers", lambda config: False)
    monkeypatch.setenv("COLUMNS", "200")  # nothing is broken into lines

    def write(sizes):
        (tmp_path / "config.json").write_text(json.dumps(sizes))
        return str(tmp_path / "config.json")

    return write


def test_a_thousand_ranks(ndtp, config, tmp_path):
    words = ("--ranks", "1024", "--hardware", "h100-ib", "--top", "3", "--plot", str(tmp_path / "a.png"))
    code, out, said = ndtp("plan", "--model", config(LARGE), *words, "--json", "-")
    assert code == 0, said
    result = json.loads(out)
    assert result["request"]["sequence"] == 8192 and result["request"]["batch"] == 512
    best, use = result["plans"][0], result["use"][0]
    assert math.prod(best["grid"].values()) == 1024 and best["memory_bytes"] < 72 * 2**30
    assert sum(best["parts_ms"].values()) == pytest.approx(best["step_ms"])
    assert sum(best["memory_parts"].values()) >= best["memory_bytes"]
    grid = best["grid"]
    rows = grid["dp"] * grid["e"] * grid["z"] * use["micro_batch"] * use["micro_batches"]
    assert rows == 512 and 0.2 < best["mfu"] < 0.6
    assert best["tokens_per_second"] == pytest.approx(512 * 8192 / best["step_ms"] * 1e3)
    said = " ".join(said.split())
    assert "of a step multiplies" in said and "What limits it" in said and "beside the first" in said
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    # The others are no faster than the first, but for what predictions do not tell apart.
    assert all(each["step_ms"] >= 0.99 * best["step_ms"] for each in result["plans"])


def test_what_ndtp_does_not_run_is_named_beside_what_it_runs(ndtp, config):
    """Long sequences on many ranks: splits over stages and sequences are faster, and ndtp runs none of them."""
    words = ("--ranks", "1024", "--sequence", "131072", "--batch", "32", "--top", "4", "--json", "-", "--model")
    code, out, said = ndtp("plan", *words, config(LARGE))
    result, said = json.loads(out), " ".join(said.split())
    assert code == 0 and all(use["runs"] for use in result["use"])
    assert all(min(each["grid"]["pp"], each["grid"]["cp"]) == 1 for each in result["plans"])
    other = re.search(r"(pp=\d+ \S.*?) would take ([\d.]+) s; ndtp splits no sequences \(cp\) between stages", said)
    assert "cp=" in other[1] and 0 < float(other[2]) < 0.99e-3 * result["plans"][0]["step_ms"]
    words = (
        "--ranks",
        "512",
        "--sequence",
        "32768",
        "--batch",
        "64",
        "--software",
        "megatron",
        "--json",
        "-",
        "--model",
    )
    code, out, said = ndtp("plan", *words, config(LARGE))
    assert code == 0 and not json.loads(out)["use"][0]["runs"]
    assert "ndtp splits no sequences (cp) between stages of a pipeline; what it runs is" in " ".join(said.split())


def test_the_picture_hides_no_bar(ndtp, config, tmp_path, monkeypatch):
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    for top in ("1", "8"):
        words = ("--ranks", "1024", "--top", top, "--plot", str(tmp_path / "a.png"))
        assert ndtp("plan", "--model", config(LARGE), *words)[0] == 0
        figure = pyplot.gcf()
        whole = figure.bbox
        for axes in figure.axes:
            legend, bars = axes.get_legend().get_window_extent(), axes.get_window_extent()
            assert not legend.overlaps(bars) and bars.height > 20 * int(top), (legend, bars)
            assert whole.x0 <= legend.x0 and legend.x1 <= whole.x1 and legend.y1 <= whole.y1, (legend, whole)
    monkeypatch.undo()
    pyplot.close("all")


def test_a_wire_is_proposed_where_it_gains_something(ndtp, config):
    words = ("plan", "--model", config(LARGE | {"num_hidden_layers": 2}), "--ranks", "8", "--top", "1", "--fix")
    for fixed, gains in (("dp=8", False), ("x=8", True)):
        code, out, said = ndtp(*words, fixed)
        assert code == 0 and ("In fewer bytes (--wire) the step would take" in out) == gains, (fixed, out, said)


def test_decoding(ndtp, config):
    words = ("--ranks", "8", "--batch", "64", "--sequence", "2048", "--top", "2", "--json", "-")
    code, out, said = ndtp("plan", "--decode", "--model", config(LARGE), *words)
    assert code == 0, said
    best, other = json.loads(out)["plans"]
    assert best["scheme"] == "1d" and best["step_ms"] <= 1.02 * other["step_ms"]
    assert sum(best["parts_ms"].values()) == pytest.approx(best["step_ms"])
    assert 'scheme="1d"' in said and "sequences: 1d," in said and "what limits it: reading weights" in said
    for wrong, message in (
        (("--decode",), "--decode and --batch take --model"),
        (("--batch", "4", "--hidden", "8", "--ffn", "8"), "--decode and --batch take --model"),
        (("--decode", "--model", config(LARGE), "--tokens", "8"), "--decode has no"),
    ):
        code, _, said = ndtp("plan", "--ranks", "8", *wrong)
        assert code == 2 and message in said, said


@pytest.mark.parametrize(
    "words, option, where",
    [
        (("--hidden", "8", "--ffn", "8", "--shared", "512"), "--shared", "without --experts"),
        (("--hidden", "8", "--ffn", "8", "--top-k", "2"), "--top-k", "without --experts"),
        (("--hidden", "8", "--ffn", "8", "--recompute", "full"), "--recompute", "without --model"),
        (("--hidden", "8", "--ffn", "8", "--software", "ndtp"), "--software", "without --model"),
        (("--hidden", "8", "--ffn", "8", "--sequence", "64"), "--sequence", "without --model"),
        (("--model", "--top-k", "2"), "--top-k", "with --model"),
        (("--model", "--no-pad"), "--no-pad", "on the step of a whole model"),
        (("--model", "--chunks", "2"), "--chunks", "on the step of a whole model"),
        (("--model", "--eager"), "--eager", "on the step of a whole model"),
        (
            ("--model", "--objective", "volume", "--recompute", "full"),
            "--recompute",
            "on a model that is planned block by",
        ),
        (("--model", "--objective", "volume", "--sequence", "8"), "--sequence", "on a model that is planned block"),
        (("--model", "--decode", "--wire", "fp8"), "--wire", "with --decode"),
        (("--model", "--decode", "--optimizer", "sgd"), "--optimizer", "with --decode"),
        (("--model", "--decode", "--no-pad"), "--no-pad", "with --decode"),
        (("--model", "--decode", "--software", "megatron"), "--software", "with --decode"),
    ],
)
def test_an_option_without_effect_is_refused(ndtp, config, words, option, where):
    words = [part for word in words for part in ([word, config(TINY)] if word == "--model" else [word])]
    tokens = () if "--decode" in words else ("--tokens", "64")
    code, _, said = ndtp("plan", "--ranks", "2", *tokens, *words)
    assert code == 2 and f"Invalid value for {option}: it has no effect {where}" in said, said


@pytest.mark.parametrize(
    "extra, says",
    [
        ({}, "in BertLMHeadModel each token sees the tokens behind it"),
        ({"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM generates none"),
        ({"is_decoder": True}, None),
    ],
    ids=str,
)
def test_decoding_takes_a_model_that_continues_text(ndtp, tmp_path, extra, says):
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    config = {"model_type": "bert", "vocab_size": 64, "max_position_embeddings": 64, **sizes, **extra}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, _, said = ndtp("plan", "--decode", "--ranks", "2", "--model", str(tmp_path), "--sequence", "64")
    if says is None:
        assert code == 0, said
    else:
        assert code == 2 and "--decode takes a model that continues text" in said and says in said, said


def test_axes_that_are_given_and_what_the_software_does(ndtp, config):
    words = ("--ranks", "64", "--software", "megatron", "--dtype", "fp8", "--recompute", "none", "--tokens", "1048576")
    code, out, _ = ndtp("plan", "--model", config(LARGE), *words, "--fix", "y=4,pp=4,cp=1", "--json", "-")
    assert code == 0
    for each, use in zip(json.loads(out)["plans"], json.loads(out)["use"], strict=True):
        assert (each["grid"]["y"], each["grid"]["pp"], use["recompute"]) == (4, 4, "none")


def test_one_long_sequence(ndtp, config):
    """ndtp runs context parallelism as a part of z, and says in which way queries meet keys, and why."""
    words = ("--ranks", "8", "--sequence", "131072", "--batch", "1", "--fix", "cp=4,y=2", "--top", "1")
    code, out, said = ndtp("plan", "--model", config(LARGE | {"num_hidden_layers": 4}), *words, "--json", "-")
    assert code == 0, said
    result = json.loads(out)
    use = result["use"][0]
    assert (result["request"]["batch"], use["runs"], use["attention"]) == (1, True, "gather")
    said = " ".join(said.split())
    assert f"Each sequence is split over 4 ranks, with attention='gather': {use['attention_why']}." in said
    assert "ndtp.Grid(z=4, y=2)" in said and "attention='gather'" in said
    assert ndtp("plan", "--model", config(LARGE), *words, "--tokens", "131072")[0] == 2


@pytest.mark.parametrize(
    "words, message",
    [
        (("--ranks", "8"), "nothing fits into 72 GiB a rank on 8 ranks"),
        (("--ranks", "1", "--layers", "10000"), "the least that any way needs is 129,000 GiB; more ranks"),
        (("--ranks", "64", "--tokens", "8193"), "--tokens 8193 are no whole sequences of 8192"),
        (("--ranks", "64", "--software", "deepspeed"), "software='deepspeed'; it must be one of ndtp"),
        (("--ranks", "64", "--recompute", "some"), "recompute='some'; it must be one of auto"),
        (
            ("--ranks", "64", "--dtype", "fp64"),
            "Invalid value for --dtype: 'fp64' is no dtype that a model's step is planned in; fix: one of bf16, fp16, "
            "fp32, fp8",
        ),
        (("--ranks", "8", "--decode", "--dtype", "fp64"), "that the decoding of a model is planned in; fix: one of"),
        (("--ranks", "8", "--objective", "memory", "--dtype", "fp8"), "fix: one of bf16, fp16, fp32, fp64"),
        (("--ranks", "64", "--dtype", "fp16", "--emit", "no.py"), "--emit writes no program for fp16"),
        (
            ("--ranks", "64", "--fix", "y=5"),
            "y=5 takes a multiple of 5 ranks, and there are 64 fix: sizes whose product",
        ),
        (("--ranks", "8", "--fix", "y=16"), "y=16 takes a multiple of 16 ranks, and there are 8 fix: sizes whose"),
        (("--ranks", "8", "--fix", "pp=2,dp=1,e=1,z=1,cp=1,x=1,y=1"), "y=1 takes 2 ranks, and there are 8"),
        (
            ("--ranks", "192", "--fix", "y=3"),
            "y=3 cannot split 64 heads, 1024 features of keys and 28672 inside; it divides",
        ),
        (
            ("--ranks", "64", "--fix", "cp=2", "--sequence", "1024"),
            "cp=2 cannot split sequences of 1024; each rank has",
        ),
        (
            ("--ranks", "64", "--fix", "cp=2,pp=2"),
            "cp=2 cannot split sequences here; ndtp splits none between the stages",
        ),
        (("--ranks", "64", "--fix", "e=2"), "e=2 cannot split experts; the model has none"),
        (("--ranks", "64", "--batch", "3", "--fix", "dp=2"), "dp=2 cannot split a batch of 3 sequences; it"),
        (("--ranks", "64", "--batch", "2", "--fix", "x=1,y=1,pp=1,cp=1"), "no way to share 64 ranks"),
        (("--ranks", "64", "--hardware", "a100-ib", "--dtype", "fp8"), "has no GEMM rate for float8"),
    ],
)
def test_wrong_use_exits_2_and_says_what_would_work(ndtp, config, words, message):
    code, _, err = ndtp("plan", "--model", config(LARGE), *words)
    assert code == 2 and message in " ".join(err.split())


@pytest.mark.parametrize(
    "config, why",
    [
        (
            transformers.ViTConfig(architectures=["ViTForImageClassification"]),
            "it has no embedding of tokens with a head",
        ),
        (
            transformers.T5Config(architectures=["T5ForConditionalGeneration"]),
            "it has attention of 2 kinds, as an encoder",
        ),
    ],
    ids=["vit", "t5"],
)
def test_a_model_that_is_planned_block_by_block_is_told_why(ndtp, tmp_path, monkeypatch, config, why):
    monkeypatch.setenv("COLUMNS", "200")
    config.save_pretrained(tmp_path)
    words = ("plan", "--model", str(tmp_path), "--ranks", "2", "--tokens", "4096", "--top", "1")
    code, out, said = ndtp(*words)
    assert code == 0 and f"without stages, micro-batches and recomputation: {why}" in " ".join(out.split()), said
    for option in (("--emit", str(tmp_path / "train.py")), ("--decode",)):
        code, _, said = ndtp(*(words if "--emit" in option else words[:5]), *option)
        assert code == 2 and f"this one is not: {why}" in " ".join(said.split()), said


def _run(text):
    names = {"__name__": "emitted"}
    exec(compile(text.replace("STEPS = 10", "STEPS = 1"), "emitted", "exec"), names)
    return names["main"]()


@pytest.mark.parametrize("fixed, ranks", [("dp=2,z=2,y=1,pp=1", 4), ("pp=2,z=2,virtual=1", 4)])
def test_the_program_that_it_writes_runs(ndtp, config, tmp_path, fixed, ranks, monkeypatch):
    words = ("--ranks", str(ranks), "--tokens", "256", "--hardware", "cpu", "--dtype", "fp32", "--recompute", "layer")
    file = tmp_path / "train.py"
    path, here = Path(config(TINY)), Path.cwd()
    monkeypatch.chdir(path.parent)
    code, _, said = ndtp("plan", "--model", path.name, *words, "--fix", fixed, "--emit", str(file))
    monkeypatch.chdir(here)  # the program is started in another folder
    assert code == 0, said
    losses = [each for each in ndtp_run(_run, ranks, (file.read_text(),)) if each[0] is not None]
    assert losses and all(abs(loss[0] - math.log(64)) < 0.5 for loss in losses)
    assert f"--nproc-per-node {1}" in file.read_text()
    assert f"torchrun --nproc-per-node {ranks} {file}  # with all ranks on one machine" in file.read_text()


def test_the_program_that_decode_writes_gives_the_tokens_of_dense(ndtp, config, tmp_path):
    """It takes the weights beside the config, wherever it is started."""
    file, path = tmp_path / "serve.py", config(TINY)
    model = _saved(path)
    words = ("--ranks", "2", "--batch", "3", "--sequence", "16", "--hardware", "cpu", "--dtype", "fp32")
    code, _, said = ndtp("plan", "--decode", "--model", path, *words, "--fix", "y=2", "--emit", str(file))
    assert code == 0, said
    text = file.read_text()
    torch.manual_seed(0)
    ids = torch.randint(64, (3, 8))
    tokens = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
    assert ndtp_run(_run, 2, (text,)) == [tokens.tolist()] * 2


def test_a_program_takes_the_weights_of_its_model_or_none(ndtp, config, tmp_path):
    """What files have by other names is read by transformers; where they lack something, nothing is drawn instead."""
    file, weights = tmp_path / "serve.py", tmp_path / "model.safetensors"
    for sizes in (TINY, MIXTRAL):
        path = config(sizes)
        words = ("--ranks", "2", "--hardware", "cpu", "--dtype", "fp32", "--emit", str(file))
        assert ndtp("plan", "--decode", "--model", path, *words)[0] == 0
        names = {"__name__": "emitted"}
        exec(compile(file.read_text(), "emitted", "exec"), names)
        saved = _saved(path).state_dict()
        names["fill"](model := names["dense"]())
        torch.testing.assert_close(model.state_dict(), saved)
        whole, key = weights.read_bytes(), "model.layers.0.self_attn.q_proj.weight"
        stored = safetensors.torch.load(whole)
        without = {name: x for name, x in stored.items() if name != key}
        for content, says in (
            (safetensors.torch.save(without), "is not in it|is no key of the model"),
            (safetensors.torch.save(without | {key: torch.zeros(8, 4)}), "that of the model|is no key of the model"),
            (whole[:-64], "model.safetensors"),
        ):
            weights.write_bytes(content)
            with pytest.raises(CheckpointError, match=says):
                names["fill"](names["dense"]())


def _saved(path):
    config = transformers.AutoConfig.from_pretrained(path)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(Path(path).parent)
    return model


def ndtp_run(function, ranks, arguments):
    return ndtp.testing.run(function, ranks=ranks, args=arguments)
