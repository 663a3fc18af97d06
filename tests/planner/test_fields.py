"""Hostile files and arguments: a profile, a config or a request is planned for in numbers, or refused in a line."""

import json
import math
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ndtp
from ndtp.algebra.schemes import block_layouts
from ndtp.errors import GridError
from ndtp.planner.fields import Number, Size, Word, in_digits, integer, shown
from ndtp.planner.hardware import Hardware, Link
from ndtp.planner.model_config import read_config
from ndtp.planner.request import Request
from ndtp.planner.search import search

quick = settings(
    max_examples=50, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip

PROFILE = {
    "ranks_per_node": 4, "gemm_half": 96.0, "memory_gib": 80.0, "memory_gbs": 2000.0, "launch_us": 5.0,
    "contention": 0.1, "tflops": {"bfloat16": 400.0},
    "intra": {"bandwidth_gbs": 300.0, "latency_us": 8.0, "hop_us": 1.0},
    "inter": {"bandwidth_gbs": 40.0, "efficiency": {"all_gather": {"2": 0.5, "8": 1.0}, "all_reduce": 0.9}},
}  # fmt: skip
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8, "num_experts": 0, "text_config": {},
    "vocab_size": 256, "tie_word_embeddings": False, "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
NUMBERS = [
    0, -1, 1, 2, 10**18, 10**30, 10**400, 0.0, -0.5, 1e-320, 1e-9, 1e300, math.nan, math.inf, -math.inf, True, False
]  # fmt: skip
JUNK = st.recursive(
    st.sampled_from([*NUMBERS, "", "8", "²", "[/]", "nan", "all_gather"]) | st.floats() | st.integers(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["", "1", "0"]), inner, max_size=2),
    max_leaves=3,
)


def places(table, path=()):
    """Every field of a table, those inside of its tables included."""
    for key, value in table.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from places(value, (*path, key))


def broken(data, table, junk):
    """The same with junk in place of a field or two, or beside them."""
    table = json.loads(json.dumps(table))
    for path in data.draw(st.lists(st.sampled_from([*places(table), ("new",)]), min_size=1, max_size=2)):
        inside = table
        for key in path[:-1]:
            inside = inside.get(key) if isinstance(inside, dict) else None
        if isinstance(inside, dict):
            inside[path[-1]] = data.draw(junk)
    return table


def toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def assert_planned(plans):
    """By numbers that are numbers."""
    for each in plans:
        times = (each.step_ms, each.gemm_ms, each.exposed_ms, each.comm_ms, each.bound_ratio)
        assert all(math.isfinite(time) and time >= 0 for time in times), each
        assert each.volume_bytes >= 0 and each.memory_bytes > 0 and "nan" not in each.why


def assert_refused(error, path):
    assert str(path) in str(error) and "\n" not in str(error)


@quick
@given(st.data())
def test_any_profile(tmp_path, data):
    path = tmp_path / "any.toml"
    table = broken(data, PROFILE, JUNK)
    path.write_text("\n".join(f"{key} = {toml(value)}" for key, value in table.items()), encoding="utf-8")
    try:
        profile = Hardware.load(path)
    except GridError as error:
        return assert_refused(error, path)
    assert_planned(ndtp.plan(64, ranks=8, hidden=16, ffn=32, hardware=profile))
    path.write_text(profile.to_toml(), encoding="utf-8")
    assert Hardware.load(path).to_toml() == profile.to_toml()


@quick
@given(st.data())
def test_any_config(tmp_path, data):
    path = tmp_path / "config.json"
    config = data.draw(st.just(broken(data, CONFIG, JUNK | st.none())) | JUNK | st.none())
    path.write_text(json.dumps(config))
    try:
        sizes = read_config(path)
    except GridError as error:
        return None if "\n  fix: " in str(error) else assert_refused(error, path)  # experts and unknown families
    assert_planned(search(Request(sizes.blocks(64), 8, Hardware.load("h100-ib"))))


@pytest.mark.parametrize(
    "content, says",
    [
        (None, "does not exist"),
        (bytes(range(256)), "its bytes are not UTF-8 text"),
        (b"", "lacks ranks_per_node, tflops|is not JSON"),
        (b"{", "is not TOML|is not JSON"),
        (b"a = " + b"[" * 10**5, "nested too deep|is not JSON"),
        (b"[" * 10**5, "is not TOML|nested too deep"),
        (b"9" * 5000, "is not TOML|Exceeds the limit"),
    ],
)
def test_any_bytes(tmp_path, content, says):
    for name, read in (("x.toml", Hardware.load), ("x.json", read_config)):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(GridError, match=says) as refused:
            read(path)
        assert_refused(refused.value, path)


def test_a_file_of_any_length_is_not_read_whole(tmp_path):
    path = tmp_path / "x.toml"
    path.touch()
    os.truncate(path, 2**40)
    with pytest.raises(GridError, match="is not TOML: it is larger than 64 MiB"):
        Hardware.load(path)


def test_numbers_in_text_have_no_exponent():
    cases = {55123.4: "55,100", 2980.0: "2,980", 999.6: "1,000", 74.2: "74.2", 1.0: "1", 0.04213: "0.0421", 0.0: "0"}
    assert {value: in_digits(value) for value in cases} == cases
    assert (in_digits(42734.0, 4), in_digits(float("inf")), in_digits(-0.5)) == ("42,730", "inf", "-0.5")


def test_a_folder_is_no_profile(tmp_path):
    (tmp_path / "x.toml").mkdir()
    with pytest.raises(GridError, match=r"x\.toml' cannot be read: Is a directory"):
        Hardware.load(tmp_path / "x.toml")


@pytest.mark.parametrize(
    "change, says",
    [
        ({"tflops": 3}, "tflops=3; it must be a table of a number from 1e-09 to 1e+12 each, whose names are"),
        ({"tflops": {}}, "tflops={}; it must be a table"),
        ({"tflops": {"fp32": 1}}, "tflops has an entry 'fp32'; its names must be one of float32"),
        ({"memory_gbs": "80"}, "memory_gbs='80'; it must be a number from 1e-09"),
        ({"contention": 1.5}, "contention=1.5; it must be a number from 0 to 1"),
        ({"ranks_per_node": 1.5}, "ranks_per_node=1.5; it must be an integer from 1 to 1,048,576"),
        ({"inter": 3}, "inter=3; it must be a table with bandwidth_gbs, latency_us"),
        ({"inter": {}}, "inter: lacks bandwidth_gbs"),
        ({"inter": {"bandwidth_gbs": math.nan}}, "inter.bandwidth_gbs=nan; it must be"),
        ({"inter": {"bandwidth_gbs": 1, "latency_us": -1}}, "inter.latency_us=-1; it must be a number from 0"),
        ({"inter": {"bandwidth_gbs": 1, "efficiency": {"all_gather": 0}}}, "inter.efficiency.all_gather=0; it must be"),
        ({"inter": {"bandwidth_gbs": 1, "efficiency": {"ag": 1}}}, "inter.efficiency has an entry 'ag'; its names"),
        (
            {"inter": {"bandwidth_gbs": 1, "efficiency": {"all_gather": {"²": 1}}}},
            "inter.efficiency.all_gather has an entry '²'; its names must be an integer from 1",
        ),
    ],
)  # fmt: skip
def test_a_profile_says_the_field_and_what_it_may_be(tmp_path, change, says):
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(f"{key} = {toml(value)}" for key, value in {**PROFILE, **change}.items()))
    with pytest.raises(GridError) as refused:
        Hardware.load(path)
    assert f"hardware profile {path}: {says}" in str(refused.value)


@pytest.mark.parametrize("value", [math.nan, -1.0, 0.0, math.inf, "1", None, True])
def test_what_is_made_in_a_program_is_checked_as_well(value):
    for make in (Link, lambda rate: Hardware("h", 1, Link(1), Link(1), {"float32": rate})):
        with pytest.raises(GridError, match="it must be a number from 1e-09"):
            make(value)


@quick
@given(st.data())
def test_any_request(data):
    """Volume is the algebra's, one grid at a time in Python's integers, however large the sizes."""
    size = st.sampled_from([1, 7, 64, 10**6, 10**12, 10**15]) | st.integers(1, 10**15) | st.sampled_from(NUMBERS)
    sizes = {name: data.draw(size) for name in ("tokens", "hidden", "ffn")}
    layers, heads = data.draw(size), data.draw(st.none() | size)
    ranks = data.draw(st.sampled_from([1, 8, 12, 12, 64]))
    try:
        plans = ndtp.plan(**sizes, ranks=ranks, layers=layers, heads=heads, objective="volume", limit=3)
    except GridError as error:
        assert "\n" not in str(error), error
        return
    for each in plans:
        assert each.volume_bytes >= 0 and each.memory_bytes > 0 and math.isfinite(each.step_ms)
        if not each.pad and heads is None:
            tokens, hidden, ffn = sizes.values()
            up, down = block_layouts(each.grid, "3d").plans()
            exact = up.volume((tokens, hidden, ffn)) + down.volume((tokens, ffn, hidden))
            if each.grid["dp"] == 1:
                assert each.volume_bytes == exact.elements * 2 * layers


def test_kinds():
    assert integer("10") == 10 and [integer(text) for text in ("²", "\uff18", "", "-1", "1_0", "9" * 19)] == [None] * 6
    assert Size(8).takes("8") and not Size(8).takes("9") and not Size(8).takes("0")
    assert not Number(0, 1).takes(True) and not Number(0, 1, integer=True).takes(1.0)
    assert Word().takes("") and not Word(("a",)).takes(["a"])
    assert shown(10**5000) == "an integer of 16610 bits" and shown("a\nb" * 99).endswith(" ...")
