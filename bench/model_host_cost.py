"""Host cost of a split Llama: Python calls of ndtp in a layer's forward, and processor time of a training step.

    python bench/host_overhead.py --model [--out bench/results/model_host_cost.json]

A tiny Llama of four layers, in one process, on the fake process group, whose collectives return at once.  Dense and
split steps are interleaved, and each number is processor time (`time.process_time`), which others on the machine change
little.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import ndtp

HERE = str(Path(ndtp.__file__).parent)
GRIDS = {"1d": {"x": 8}, "1d-sp": {"x": 8}, "2d": {"x": 2, "y": 4}, "3d": {"z": 2, "x": 2, "y": 2}}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "num_key_value_heads": 8}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, num_hidden_layers=4, use_cache=False, **sizes))


def training_step(model: Any) -> Callable[[], None]:
    ids = torch.arange(8 * 16).view(8, 16) % 128
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def calls_of_a_layer(model: Any, step: Callable[[], None]) -> tuple[int, int, dict[str, int]]:
    """Calls of functions of ndtp in one forward of the second layer, the files that they are in, and the busiest."""
    found: Counter[tuple[str, str]] = Counter()
    layer = model.model.layers[1]
    forward = layer.forward

    def look(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(HERE):
            found[frame.f_code.co_filename[len(HERE) + 1 :], frame.f_code.co_qualname] += 1

    def looked_at(*args: Any, **kwargs: Any) -> Any:
        sys.setprofile(look)
        try:
            return forward(*args, **kwargs)
        finally:
            sys.setprofile(None)

    layer.forward = looked_at
    try:
        step()
    finally:
        del layer.forward
    busiest = {f"{file} {name}": count for (file, name), count in found.most_common(12)}
    return found.total(), len({file for file, _ in found}), busiest


def of_models(repetitions: int, steps: int) -> dict[str, Any]:
    """For each scheme: calls and files of a layer's forward, and milliseconds of a step, dense and split."""
    cases = {}
    for scheme, axes in GRIDS.items():
        grid = ndtp.Grid(axes)
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=grid.num_ranks)
        try:
            split = ndtp.parallelize(llama(), ndtp.ProcessGrid(grid), scheme=scheme)
            rivals = {"dense": training_step(llama()), "split": training_step(split)}
            for run in rivals.values():
                run(), run()
            calls, files, busiest = calls_of_a_layer(split, rivals["split"])
            times: dict[str, list[float]] = {name: [] for name in rivals}
            for _ in range(repetitions):
                for name, run in rivals.items():
                    start = time.process_time()
                    for _ in range(steps):
                        run()
                    times[name].append(1e3 * (time.process_time() - start) / steps)
            dense, ours = (statistics.median(times[name]) for name in ("dense", "split"))
            cases[f"{scheme} {grid}"] = {
                "calls": calls, "files": files, "dense_ms": round(dense, 2), "split_ms": round(ours, 2),
                "ratio": round(ours / dense, 2), "busiest": busiest,
            }  # fmt: skip
        finally:
            dist.destroy_process_group()
    return cases
