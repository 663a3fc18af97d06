"""Profiles: presets, TOML files, and what is said of bad ones."""

import numpy as np
import pytest

from ndtp.errors import GridError
from ndtp.planner.hardware import PRESETS, Hardware, Link


def test_presets_cover_devices_and_fabrics():
    for device in ("a100", "h100", "h200", "b200", "mi300x"):
        for fabric in ("ib", "roce", "eth"):
            profile = Hardware.load(f"{device}-{fabric}")
            assert profile.ranks_per_node == 8
            assert profile.intra.bandwidth_gbs > profile.inter.bandwidth_gbs > 0
    assert {"pcie", "cpu"} <= set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_toml_round_trip(tmp_path, name):
    path = tmp_path / "mine.toml"
    path.write_text(PRESETS[name].to_toml())
    read = Hardware.load(path)
    assert read.ranks_per_node == PRESETS[name].ranks_per_node
    assert read.intra.bandwidth_gbs == pytest.approx(PRESETS[name].intra.bandwidth_gbs, rel=1e-5)
    assert dict(read.tflops) == pytest.approx(dict(PRESETS[name].tflops), rel=1e-5)
    assert read.to_toml() == path.read_text()


def test_efficiency_of_a_collective(tmp_path):
    link = Link(10.0, efficiency={"reduce_scatter": 0.5})
    assert link.seconds_per_byte("all_gather", 4) == pytest.approx(1e-10)
    assert link.seconds_per_byte("reduce_scatter", 4) == pytest.approx(2e-10)
    path = tmp_path / "mine.toml"
    path.write_text(Hardware("mine", 2, link, link, {"float32": 1.0}, gemm_half=-0.0).to_toml())
    assert Hardware.load(path).to_toml() == path.read_text()
    path.write_text(Hardware("mine", 2, link, link, {"float32": 1.0}).to_toml())
    assert Hardware.load(str(path)).inter.efficiency == {"reduce_scatter": 0.5}


def test_efficiency_by_group_size(tmp_path):
    """Of the nearest smaller size that was measured; files hold sizes as strings."""
    path = tmp_path / "mine.toml"
    link = Link(1.0, efficiency={"all_gather": {8: 1.0, 2: 0.5}})
    path.write_text(Hardware("mine", 2, link, link, {"float32": 1.0}, contention=0.3).to_toml())
    read = Hardware.load(str(path))
    assert read.contention == 0.3
    assert read.inter.efficiency == {"all_gather": {2: 0.5, 8: 1.0}}
    per_byte = read.inter.seconds_per_byte("all_gather", np.array([1, 2, 4, 8, 16]))
    assert per_byte.tolist() == pytest.approx([2e-9, 2e-9, 2e-9, 1e-9, 1e-9])


def test_one_link_serves_for_both(tmp_path):
    path = tmp_path / "flat.toml"
    path.write_text("ranks_per_node = 1\n[tflops]\nfloat32 = 0.1\n[inter]\nbandwidth_gbs = 0.0625\n")
    profile = Hardware.load(path)
    assert (profile.name, profile.intra) == ("flat", profile.inter)


@pytest.mark.parametrize(
    "text, message",
    [
        ("ranks_per_node = 8\n[intra]\nbandwidth_gbs = 1\n", "lacks tflops"),
        ("ranks_per_node = 8\n[tflops]\nfloat32 = 1\n", "lacks intra or inter"),
        ("ranks_per_nodes = 8\n[tflops]\nfloat32 = 1\n[intra]\nbandwidth_gbs = 1\n", "did you mean ranks_per_node"),
        ("ranks_per_node = 8\n[tflops]\nfloat32 = 1\n[intra]\nbandwidth = 1\n", "bandwidth"),
        (
            "ranks_per_node = 8\n[tflops]\nfloat32 = 1\n[intra]\nbandwidth_gbs = -1\n",
            "intra.bandwidth_gbs=-1; it must be a number from 1e-09",
        ),
        ("ranks_per_node = [", "is not TOML"),
    ],
)
def test_bad_files(tmp_path, text, message):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(GridError, match=message):
        Hardware.load(path)


def test_missing_file_and_rate(tmp_path):
    with pytest.raises(GridError, match="ndtp bench calibrate"):
        Hardware.load(tmp_path / "none.toml")
    with pytest.raises(GridError, match="no GEMM rate for float64"):
        Hardware.load("h100-ib").flops_per_second("float64")


def test_wide_attention_is_no_faster_than_products():
    hardware = Hardware.load("h100-ib")
    assert hardware.attention_rate("flash3") > hardware.flops_per_second("float32")
    assert hardware.attention_rate("flash3", "float32") == hardware.flops_per_second("float32")
    assert hardware.peak("float32") > hardware.flops_per_second("float32")
