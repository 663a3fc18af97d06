"""One long sequence on a grid: equal to dense in every way of attention, its bytes, its memory and its balance.

    python bench/long_sequences.py [--out bench/results/long_sequences.json] [--grids 2x2x2 1d-sp --classes-only]

- classes: stock causal models of transformers in fp64, one sequence on four or eight ranks, in three ways: the largest
  error of the loss and of any gradient, as a part of the largest entry, and whether a step's bytes are those of
  `report.volume`.
- memory: bytes that live beside parameters in a step of a stock Llama, counted on the rank that has most, against the
  dense step's: kept from forward to backward, and the peak.  The bound is 1.1 / ranks of dense and two parts of keys
  and values.
- balance: pairs of a query and a key that ranks of a ring multiply in a turn, the most over the least.
"""

from __future__ import annotations

import argparse
import json
import traceback
import warnings
from datetime import date
from pathlib import Path

import torch
import transformers

import ndtp
import ndtp.testing
from ndtp.algebra.attention_ways import WAYS
from ndtp.algebra.ring_plan import RingPlan
from ndtp.ops.memory import LiveBytes

TYPES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi", "phi3", "gpt2", "gpt_neox", "opt",
    "mixtral", "olmo", "olmo2", "stablelm", "starcoder2", "granite", "cohere", "glm", "gptj", "bloom", "falcon",
)  # fmt: skip
TINY = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 4, "max_position_embeddings": 64, "sliding_window": 5, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "n_embd": 32, "n_head": 8, "n_layer": 2, "n_inner": 64, "n_positions": 64,
    "ffn_dim": 64, "word_embed_proj_dim": 32, "rotary_dim": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
    "attn_pdrop": 0.0, "attention_dropout": 0.0, "hidden_dropout": 0.0, "dropout": 0.0,
}  # fmt: skip
SIZES = {"hidden": 128, "inner": 512, "layers": 4, "heads": 8, "vocabulary": 256}
GRIDS = {  # and their schemes
    "2d": ("2d", {"x": 2, "y": 2}),
    "3d": ("3d", {"z": 4, "x": 1, "y": 1}),
    "1d-sp": ("1d-sp", {"x": 4}),
    "2x2x2": ("3d", {"z": 2, "x": 2, "y": 2}),
    "2x4": ("2d", {"x": 2, "y": 4}),
    "z=4 y=2": ("3d", {"z": 4, "x": 1, "y": 2}),
}
MEMORY = (2048, 4, 4), (8192, 8, 4), (8192, 8, 1)  # tokens of one sequence, ranks of z, heads of keys
LENGTH = 14  # which four ranks do not divide


def model_of(kind: str) -> torch.nn.Module:
    own = {"gpt2": ("hidden_size",), "gptj": ("hidden_size",), "bloom": ("head_dim",), "falcon": ("head_dim",)}.get(
        kind, ()
    )
    config = transformers.AutoConfig.for_model(kind, **{name: x for name, x in TINY.items() if name not in own})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped products take no fp64
    return model


def compared(kind: str, grid: str) -> dict:
    """One class in each way, on this rank."""
    ids = torch.randint(3, 96, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    dense = model_of(kind)
    expected = dense(input_ids=ids, labels=ids).loss
    expected.backward()
    found: dict = {}
    scheme, sizes = GRIDS[grid]
    for way in WAYS:
        mesh = ndtp.ProcessGrid(ndtp.Grid(sizes))
        try:
            model = ndtp.parallelize(model_of(kind), mesh, scheme=scheme, attention=way)
            with ndtp.CommMeter() as meter:
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
            worst = 0.0
            for mine, theirs in zip(model.parameters(), dense.parameters(), strict=True):
                if theirs.grad is not None:
                    grad = mine.grad.full_tensor() if hasattr(mine.grad, "full_tensor") else mine.grad
                    grad = grad.reshape(theirs.shape) if grad.numel() == theirs.numel() else grad
                    worst = max(
                        worst, float((grad - theirs.grad).abs().max() / theirs.grad.abs().max().clamp_min(1e-9))
                    )
            found[way] = {
                "loss": abs(loss.item() - expected.item()), "gradient": worst, "bytes": meter.volume.total,
                "predicted": model.ndtp_report.volume(1, LENGTH).total, "gathered": dict(model.ndtp_report.gathered),
            }  # fmt: skip
        except Exception as error:
            found[way] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0]}", "where": _last(error)}
    return found


def _last(error: Exception) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"


def step(model: torch.nn.Module, ids: torch.Tensor) -> dict[str, int]:
    """Bytes that live beside the model: kept from forward to backward, and at most."""
    for _ in range(2):
        model.zero_grad()
        with LiveBytes() as live:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            kept = live.now
            loss.backward()
    return {"kept": kept, "peak": live.peak}


def llama(length: int, kv_heads: int) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=SIZES["vocabulary"], hidden_size=SIZES["hidden"], intermediate_size=SIZES["inner"],
        num_hidden_layers=SIZES["layers"], num_attention_heads=SIZES["heads"], num_key_value_heads=kv_heads,
        max_position_embeddings=length,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def ids_of(length: int) -> torch.Tensor:
    return torch.randint(3, SIZES["vocabulary"], (1, length), generator=torch.Generator().manual_seed(1))


def on_a_rank(way: str, length: int, sizes: dict[str, int], kv_heads: int) -> dict[str, int]:
    mesh = ndtp.ProcessGrid(ndtp.Grid(sizes), ring_bytes=0)
    return step(ndtp.parallelize(llama(length, kv_heads), mesh, attention=way), ids_of(length))


def memory(length: int, ranks: int, kv_heads: int) -> dict:
    sizes = {"z": ranks, "x": 1, "y": 1}
    dense = step(llama(length, kv_heads), ids_of(length))
    part = 2 * length // ranks * SIZES["hidden"] * kv_heads // SIZES["heads"] * 4
    bound = {key: int(1.1 * value / ranks + 2 * part) for key, value in dense.items()}
    ways = {way: ndtp.testing.run(on_a_rank, ranks=ranks, args=(way, length, sizes, kv_heads)) for way in WAYS}
    most = {way: {key: max(each[key] for each in found) for key in dense} for way, found in ways.items()}
    return {"grid": sizes, "dense": dense, "bound": bound, "a part of k and v": part} | most


def balance() -> dict[str, float]:
    found = {}
    for ranks in (2, 4, 8, 64):
        plan = RingPlan(ndtp.Grid(x=ranks), ("x",), 131072, 131072 // ranks, True)
        turns = zip(*(plan.work(index) for index in range(ranks)), strict=True)
        found[str(ranks)] = max(max(turn) / min(turn) for turn in turns)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("bench/results/long_sequences.json"))
    parser.add_argument("--types", nargs="*", default=TYPES)
    parser.add_argument("--grids", nargs="*", default=list(GRIDS), choices=list(GRIDS))
    parser.add_argument(
        "--classes-only", action="store_true", help="go on with the record's classes, and keep the rest"
    )
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    result: dict = {"date": f"{date.today()}", "torch": torch.__version__, "transformers": transformers.__version__}
    result |= {"length": LENGTH, "grids": {name: sizes for name, (_, sizes) in GRIDS.items()}}
    if arguments.classes_only:
        result = json.loads(arguments.out.read_text()) | result
    else:
        memories = {
            f"{sizes[0]} tokens, {sizes[1]} ranks, {sizes[2]} heads of keys": memory(*sizes) for sizes in MEMORY
        }
        result |= {"sizes": SIZES, "balance": balance(), "memory": memories, "classes": {}}
    for grid in arguments.grids:
        for kind in arguments.types:
            if grid in result["classes"].get(kind, {}):
                continue
            try:
                found = ndtp.testing.run(compared, ndtp.Grid(GRIDS[grid][1]).num_ranks, args=(kind, grid))[0]
            except Exception as error:  # such as ranks that hang
                found = {"error": str(error).splitlines()[0]}
            result["classes"].setdefault(kind, {})[grid] = found
            print(kind, grid, json.dumps(found), flush=True)
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("balance", "memory")}, indent=1))


if __name__ == "__main__":
    main()
