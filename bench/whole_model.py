"""A whole model behind slow links: torch's sequence-parallel plan against the planner's best grid.

    for rate in 200mbit 500mbit; do
        python bench/slow_network.py --ranks 8 --rate $rate --burst 80kb -- \
            python bench/whole_model.py --rate $rate --out bench/results/whole_model.json
    done

Forward and backward of a stock Llama of eight layers, loss included.  torch's rival is torchtitan's Llama plan: 1D,
hidden states split by tokens between blocks, vocabulary-parallel embedding and head, loss parallel.  ndtp's grid is the
planner's first choice, by a profile calibrated on the spot; both are compared with the dense model first, loss and the
gradients of the first layer, which all that follows goes into.  Interleaved, median of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from planner_accuracy import profile_of
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import ndtp
from ndtp.measure.step import turns
from ndtp.planner.block_cost import Block
from ndtp.planner.model_config import sizes_of
from ndtp.planner.model_sizes import ModelSizes
from ndtp.planner.request import Request
from ndtp.planner.search import search

TORCH = "torch, sequence and loss parallel"
CHECKED = "model.layers.0."  # whose gradients are compared
CHECK_LENGTH = 16
Step = Callable[[Tensor], Tensor]


def config_of(arguments: argparse.Namespace) -> transformers.LlamaConfig:
    return transformers.LlamaConfig(
        vocab_size=arguments.vocabulary, hidden_size=arguments.hidden, intermediate_size=arguments.inner,
        num_hidden_layers=arguments.layers, num_attention_heads=arguments.heads, use_cache=False,
        num_key_value_heads=arguments.heads, max_position_embeddings=arguments.length,
        tie_word_embeddings=False, attn_implementation="sdpa",
    )  # fmt: skip


def model_of(arguments: argparse.Namespace) -> Any:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config_of(arguments))


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    """Of the next token, as transformers computes it."""
    targets = F.pad(ids, (0, 1), value=-100)[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def torch_plan(model: Any) -> Step:
    """torchtitan's plan of a Llama, for the names of transformers."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
    }
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    by_name = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
    )
    for i in range(model.config.num_hidden_layers):
        layer = f"model.layers.{i}."
        plan |= {
            layer + "input_layernorm": SequenceParallel(),
            layer + "self_attn": by_name,
            **{f"{layer}self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
            layer + "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
            layer + "post_attention_layernorm": SequenceParallel(),
            layer + "mlp": whole,
            **{f"{layer}mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
            layer + "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
        }
    parallelize_module(model, mesh, plan)

    def step(ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1])[None]  # hidden states have a part of them
        with loss_parallel():
            loss = loss_of(model(input_ids=ids, position_ids=positions).logits, ids)
            loss.backward()
        return loss

    return step


def ndtp_grid(model: Any, mesh: ndtp.ProcessGrid, scheme: str, chunks: int | str) -> Step:
    ndtp.parallelize(model, mesh, scheme=scheme, chunks=chunks)
    rows = mesh.coordinate.get("dp", 0)

    def step(ids: Tensor) -> Tensor:
        mine = ids.chunk(mesh.grid["dp"] if "dp" in mesh.grid else 1)[rows]
        loss = model(input_ids=mine, labels=mine).loss
        loss.backward()
        return loss

    return step


def full(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def check(name: str, model: nn.Module, step: Step, dense: tuple[Tensor, dict[str, Tensor]], ids: Tensor) -> None:
    """
    Raises:
        AssertionError: another loss than the dense model's, or another gradient of its first layer.
    """
    loss, gradients = dense
    torch.testing.assert_close(full(step(ids).detach()), loss, rtol=1e-4, atol=1e-5, msg=lambda m: f"{name}, loss: {m}")
    for key, parameter in model.named_parameters():
        if key.startswith(CHECKED):
            scale = float(gradients[key].abs().max())
            error = float((full(parameter.grad) - gradients[key]).abs().max())
            assert error <= 1e-4 * scale + 1e-7, f"{name}, gradient of {key}: {error:.1e} of {scale:.1e}"
    model.zero_grad()


def timed(model: nn.Module, step: Step, ids: Tensor) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    step(ids)
    for parameter in model.parameters():  # until all of it is there
        getattr(parameter.grad, "_local_tensor", parameter.grad).sum()
    elapsed = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    model.zero_grad()
    return float(elapsed)


def planned(sizes: ModelSizes, arguments: argparse.Namespace) -> tuple[Any, Any, str]:
    """The planner's first choice, and its prediction of 1D."""
    hardware, _, toml = profile_of(arguments)
    blocks: tuple[Block, ...] = sizes.blocks(arguments.batch * arguments.length)
    plans = search(Request(blocks, dist.get_world_size(), hardware, dtype="float32", pad=False))
    one = next(plan for plan in plans if plan.grid.nontrivial(plan.grid.names) in (("x",), ("y",)))
    return plans[0], one, toml


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"batch": 8, "length": 256, "hidden": 512, "inner": 1408, "layers": 8, "heads": 8, "vocabulary": 4096}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--rate", required=True, help="of the links, as given to slow_network.py")
    parser.add_argument("--grid", help="take this one, such as z=2,y=4, not the planner's choice")
    parser.add_argument("--out", type=Path, help="JSON; other rates in it are kept")
    for name, value in (("repeats", 3), ("largest", 1.0), ("sustain", 0.1)):  # of the calibration
        parser.add_argument(f"--{name}", type=type(value), default=value)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    best, one, toml = planned(sizes_of(config_of(arguments).to_dict()), arguments)
    grid, scheme = best.grid, best.scheme
    if arguments.grid:
        grid, scheme = ndtp.Grid({a: int(n) for a, _, n in (w.partition("=") for w in arguments.grid.split(","))}), "3d"
    given = torch.Generator().manual_seed(1)
    ids = torch.randint(arguments.vocabulary, (arguments.batch, arguments.length), generator=given)
    dense = model_of(arguments)
    loss = dense(input_ids=ids[:, :CHECK_LENGTH], labels=ids[:, :CHECK_LENGTH]).loss
    loss.backward()
    kept = {key: p.grad for key, p in dense.named_parameters() if key.startswith(CHECKED) and p.grad is not None}
    expected, dense = (loss.detach(), kept), None
    rivals: dict[str, tuple[Any, Step]] = {}
    for name, chunks in ((TORCH, None), (f"ndtp {grid}", 0), (f"ndtp {grid}, in chunks", "auto")):
        model = model_of(arguments)
        step = torch_plan(model) if chunks is None else ndtp_grid(model, ndtp.ProcessGrid(grid), scheme, chunks)
        check(name, model, step, expected, ids[:, :CHECK_LENGTH])
        rivals[name] = model, step
        if rank == 0:
            print(f"{name}: as the dense model", flush=True)
    times: dict[str, list[float]] = {name: [] for name in rivals}
    for round_ in range(arguments.repetitions):
        for name in turns(rivals, round_):
            times[name].append(timed(*rivals[name], ids))
    if rank == 0:
        medians = {name: statistics.median(each) * 1e3 for name, each in times.items()}
        rows = {name: {"step_ms": ms, "speedup": medians[TORCH] / ms} for name, ms in medians.items()}
        for name, row in rows.items():
            print(f"{name:40} {row['step_ms']:9.0f} ms {row['speedup']:6.2f}x")
        print(f"predicted: {best.grid} {best.step_ms:.0f} ms, 1D {one.step_ms:.0f} ms")
        predicted = {"grid": str(best.grid), "step_ms": best.step_ms, "1d_ms": one.step_ms}
        run = {"rows": rows, "predicted": predicted, "profile": toml, "repetitions": arguments.repetitions}
        write(arguments.out, arguments.rate, run | {"sizes": {name: getattr(arguments, name) for name in sizes}})
    dist.barrier()
    dist.destroy_process_group()


def write(path: Path | None, rate: str, run: dict[str, Any]) -> None:
    if path is None:
        return
    results = json.loads(path.read_text()) if path.exists() else {"runs": {}}
    results |= {
        "date": str(date.today()), "torch": torch.__version__, "ranks": dist.get_world_size(), "dtype": "float32",
        "unit": "ms of forward and backward, median of the slowest rank; gloo on CPUs, no NCCL figure",
    }  # fmt: skip
    results["runs"][rate] = run
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
