"""Texts and files that anybody may hand to ndtp, at random: taken, or refused by an error of ndtp's own.

    nice python tests/fuzz/inputs.py --examples 100000 --out bench/results/fuzz_inputs.json

Of each kind (layouts, einsums, hardware profiles, model configs, checkpoints, command lines) so many examples of
hypothesis.  Another exception, an example that takes a minute (beside the time for which the kernel gave this process
no processor), or more than 1 GiB of memory beyond what the program had at first, is a failure, and is recorded in its
smallest form.  The record is written every thousand examples, and a second call goes on from it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests" / "planner"), str(ROOT / "tests" / "cli"), str(ROOT / "tests")]

import test_fields as fields  # noqa: E402
import test_wrong_use as commands  # noqa: E402
import torch  # noqa: E402
import torch.distributed.fsdp  # noqa: E402  (an import that is broken off cannot be begun again)

import ndtp  # noqa: E402
from ndtp import Grid, Layout  # noqa: E402
from ndtp.algebra import einsum  # noqa: E402
from ndtp.checkpoints import folder as folders  # noqa: E402
from ndtp.checkpoints.safetensors_file import tensors_in  # noqa: E402
from ndtp.errors import CheckpointError, GridError, LayoutError  # noqa: E402
from ndtp.planner.hardware import Hardware  # noqa: E402
from ndtp.planner.model_config import read_config  # noqa: E402

SECONDS, MEMORY, BATCH = 60, 2**30, 1000
GRID = Grid(z=2, x=2, y=2)
NAMES = ["x", "y", "z", "None", "(", ")", ",", " ", "()", "(x", "y)", "'", "(z y)", "xx", "\n", "²"]
LETTERS = ["b", "m", "k", "n", " ", ",", "->", "b m k", "k n", "é", "1", "_", ", ", " -> ", "m m", "\t"]
REPEATED = ["[", "{", '"', "9", "\x00", "é", "-", ".", "[[", '{"a":']


def layout(data, folder):
    text = data.draw(st.lists(st.sampled_from(NAMES), max_size=12).map("".join) | st.text(max_size=30))
    try:
        found = Layout.parse(GRID, text)
    except LayoutError:
        return
    assert Layout.parse(GRID, str(found)) == found, text


def expression(data, folder):
    text = data.draw(st.lists(st.sampled_from(LETTERS), max_size=16).map("".join) | st.text(max_size=30))
    try:
        operands, _ = einsum.parse(text)
        entries = st.sampled_from([None, "x", "y", "z", ("z", "y")])
        layouts = [Layout(GRID, *(data.draw(entries) for _ in names)) for names in operands]
        sizes = data.draw(st.lists(st.sampled_from([0, 1, 4, 8, 2**40]), min_size=1, max_size=3))
        shapes = [[sizes[hash_of(name) % len(sizes)] for name in names] for names in operands]
        str(einsum.EinsumPlan(text, layouts, shapes))
    except LayoutError:
        return


def hash_of(name):
    """The same in every process."""
    return sum(map(ord, name))


def profile(data, folder):
    path = folder / "any.toml"
    table = fields.broken(data, fields.PROFILE, fields.JUNK)
    text = "\n".join(f"{key} = {fields.toml(value)}" for key, value in table.items()).encode()
    path.write_bytes(spoiled(data, text))
    try:
        found = Hardware.load(path)
    except GridError:
        return
    path.write_text(found.to_toml(), encoding="utf-8")
    assert Hardware.load(path).to_toml() == found.to_toml()


def config(data, folder):
    path = folder / "config.json"
    table = data.draw(st.just(fields.broken(data, fields.CONFIG, fields.JUNK | st.none())) | fields.JUNK | st.none())
    path.write_bytes(spoiled(data, json.dumps(table).encode()))
    try:
        read_config(path).blocks(64)
    except GridError:
        return


def checkpoint(data, folder):
    """The manifest and a file of tensors of a whole checkpoint, the index and header of plain safetensors."""
    run = folder / "run"
    if not run.exists():
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        ndtp.checkpoint.save(model, optimizer, run, extra={"step": 1})
        ndtp.checkpoint.export_safetensors(model, folder / "plain")
        index = {"metadata": {}, "weight_map": {"weight": "model.safetensors", "bias": "model.safetensors"}}
        (folder / "plain" / "model.safetensors.index.json").write_text(json.dumps(index))
        (folder / "whole.json").write_text(
            json.dumps({str(each): each.read_bytes().hex() for each in folder.rglob("*") if each.is_file()})
        )
    whole = json.loads((folder / "whole.json").read_text())
    path = data.draw(st.sampled_from(sorted(whole)))
    before = bytes.fromhex(whole[path])
    Path(path).write_bytes(spoiled(data, before))
    try:
        read = tensors_in if "plain" in path else folders.read
        read(folder / "plain" if "plain" in path else run)
    except CheckpointError:
        return
    finally:
        Path(path).write_bytes(before)


def command(data, folder):
    os.chdir(folder)
    name, option, count = data.draw(st.sampled_from(commands.OPTIONS))
    others = [each for each in commands.OPTIONS if each[0] == name]
    words = commands.given_to(name)
    for _, each, number in [(name, option, count), *data.draw(st.lists(st.sampled_from(others), max_size=2))]:
        words += [each, *(data.draw(commands.ANY) for _ in range(number))]
    commands.assert_sound(words, commands.run(*name.split(), *words))


KINDS = {"layout": layout, "einsum": expression, "profile": profile, "config": config, "checkpoint": checkpoint,
         "command": command}  # fmt: skip


def spoiled(data, text):
    """The bytes with some of them gone, changed, doubled, or with others between."""
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, max(len(text) - 1, 0)))
        end = at + data.draw(st.integers(0, 12))
        put = data.draw(
            st.binary(max_size=4)
            | st.sampled_from([text[at:end] * 2, b"null", b"-1", b"1e999", b"NaN", b"../../etc/passwd", b"[]"])
            | st.builds(lambda c, n: (c * n).encode(), st.sampled_from(REPEATED), st.sampled_from([3, 100, 10**5]))
        )
        text = text[:at] + put + text[end:]
    return text


def run_batch(kind, number, examples, folder):
    """So many examples; the failure in its smallest form, or nothing."""
    failure, begun = "", 0.0

    @seed(number)
    @settings(max_examples=examples, deadline=None, database=None, phases=[Phase.generate, Phase.shrink],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.data())
    def one(data):
        nonlocal begun
        begun = starved_s()
        signal.alarm(SECONDS)
        try:
            KINDS[kind](data, folder)
        finally:
            signal.alarm(0)

    def too_long(*_):
        nonlocal begun
        if (waited := starved_s() - begun) >= 1:
            begun += waited
            signal.alarm(int(waited))
            return
        raise TimeoutError(f"an example takes more than {SECONDS} s")

    before, place = signal.signal(signal.SIGALRM, too_long), os.getcwd()
    try:
        one()
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        failure = "".join(traceback.format_exception(error))[-3000:]
    finally:
        signal.signal(signal.SIGALRM, before)
        os.chdir(place)
    return failure


def starved_s():
    """Seconds that this process was ready to run and did not."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


def bound_memory():
    """1 GiB beyond what the program has; what takes more is a MemoryError, and so a failure."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, resource.RLIM_INFINITY))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=100_000, help="of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "fuzz_inputs.json")
    options = parser.parse_args()
    record = json.loads(options.out.read_text()) if options.out.exists() else {}
    until = time.monotonic() + 60 * options.minutes
    commands.ndtp.testing.run = commands.starts  # what starts ranks ends there, well
    bound_memory()
    with tempfile.TemporaryDirectory() as folder:
        for name in options.kinds:
            (Path(folder) / name).mkdir()
        for turn, kind in itertools.product(range(-(-options.examples // BATCH)), options.kinds):
            so_far = record.setdefault(kind, {"examples": 0, "seconds": 0.0, "failures": []})
            if so_far["examples"] > turn * BATCH or time.monotonic() > until:
                continue
            began = time.process_time()
            failure = run_batch(kind, turn, BATCH, Path(folder) / kind)
            so_far["examples"] += BATCH
            so_far["seconds"] = round(so_far["seconds"] + time.process_time() - began, 1)
            so_far["failures"] += [{"batch": turn, "what": failure}] if failure else []
            if failure:
                print(kind, turn, failure[-600:], flush=True)
            options.out.write_text(json.dumps(record, indent=1) + "\n")
    print({kind: (each["examples"], len(each["failures"])) for kind, each in record.items()})
    return 1 if any(each["failures"] for each in record.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
