"""Every model type of transformers on a grid against dense, with its config made small by rule: outputs, gradients and
greedily generated tokens.

    python tests/models/every_type.py [--grid z=2,x=2,y=2 --scheme 3d] [--types bert t5] [--json FILE [--again]]

`every_class.py` takes the configs of transformers' own tests, which this one does without: sizes, layers, heads and
experts of a default config are cut down by the words in their names, and inputs are made up by the name of the first
one.  A type whose small model does not run densely is "no dense".  Models run in fp64, or in fp32 where their code asks
for that, and then rounding is allowed.  With --json what the file has is kept, so that a run goes on where another
stopped; with --again all but what is equal is compared anew.  400 types take a quarter of an hour on two ranks.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

sys.path.append(str(Path(__file__).parents[1]))  # of `products`
from architectures import as_dense

import ndtp
import ndtp.testing
from ndtp.algebra.grid import Grid

# A whole number of a config whose name has the word becomes at most this; the first word counts.
SIZES = {
    "vocab": 97, "max_position": 64, "n_positions": 64, "image_size": 16, "patch_size": 4, "intermediate": 64,
    "ffn": 64, "n_inner": 64, "d_ff": 64, "num_key_value": 2, "n_kv": 2, "kv_heads": 2, "heads": 4, "n_head": 4,
    "head_dim": 8, "d_kv": 8, "layers": 2, "n_layer": 2, "depth": 2, "hidden_size": 32, "d_model": 32, "n_embd": 32,
    "embed_dim": 32, "rotary_dim": 4, "dim": 32, "width": 32, "num_experts_per": 2, "experts": 4, "num_mel": 8,
}  # fmt: skip
# Words of names that are no size of a model, though one of the words above is in them.
NO_SIZES = ("kernel", "stride", "dilation", "_factor", "threshold")
# Of latent attention, and of states: sizes that have to fit one another.
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_head_dim": 16, "n_group": 2, "topk_group": 1, "num_key_value_heads": 4,
    "index_topk": 4,
}  # fmt: skip
STATES = {
    "attn_layer_period": 2, "attn_layer_offset": 1, "moe_k": 2, "mamba_n_heads": 8, "mamba_d_head": 8,
    "mamba_d_ssm": 64, "mamba_num_heads": 8, "mamba_head_dim": 8, "time_step_rank": 4, "mamba_dt_rank": 4,
    "state_size": 8, "mamba_d_state": 8, "ssm_state_size": 8, "n_groups": 2, "mamba_n_groups": 2,
}  # fmt: skip
# Layers, size of rotary parts, whether widths stay as they are, dtype: the first with which the dense model runs.
WAYS = [
    (*sizes, dtype)
    for dtype in (torch.float64, torch.float32)
    for sizes in ((2, 8, False), (4, 8, False), (2, 4, False), (8, 8, False), (2, 64, True))
]
WIDTHS = ("hidden_size", "d_model", "embed_dim", "dim", "width", "heads", "n_head", "kv", "head_dim", "depth")
MOST_PARAMETERS, MOST_WIDE = 8e6, 3e7
MELS = ("num_mel_bins", "num_mel_bands", "feature_size", "input_feat_per_channel", "n_mels", "input_dim")
TASKS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION", "IMAGE_TEXT_TO_TEXT",
         "AUDIO_CLASSIFICATION", "SEQUENCE_CLASSIFICATION")  # fmt: skip


def types() -> dict[str, str]:
    """Model type -> the class that is compared: the first task that it has a head for, else the bare model."""
    found: dict[str, str] = {}
    for task in (*(f"MODEL_FOR_{task}_MAPPING_NAMES" for task in TASKS), "MODEL_MAPPING_NAMES"):
        for name, kind in getattr(modeling_auto, task).items():
            found.setdefault(name, kind if isinstance(kind, str) else kind[0])
    return {name: kind for name, kind in found.items() if hasattr(transformers, kind)}


def small(config: Any, layers: int, rope: int, is_wide: bool) -> Any:
    for key, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            small(value, layers, rope, is_wide)
        elif key == "layer_types" and isinstance(value, list):
            kinds = list(dict.fromkeys(value))
            config.layer_types = [kinds[i % len(kinds)] for i in range(layers)]
        elif key == "image_size" and isinstance(value, (list, tuple)):
            config.image_size = [16] * len(value)
        elif key == "head_dim" and value is None and not is_wide:
            _set(config, key, 8)
        elif key in ("rope_parameters", "rope_scaling") and isinstance(value, dict) and "mrope_section" in value:
            value["mrope_section"] = value["mrope_section"] if is_wide else [2, 1, 1]
        elif key == "prediction_length" and value is None:
            _set(config, key, 4)
        elif any(word in key for word in NO_SIZES) or (is_wide and any(word in key for word in WIDTHS)):
            continue
        elif isinstance(value, int) and not isinstance(value, bool):
            if key.endswith(("_token_id", "_token_index")):
                size = 90
            else:
                size = next((size for word, size in SIZES.items() if word in key), value)
            size = layers if size == 2 and "layer" in key else size
            size = rope if key in ("qk_rope_head_dim", "rotary_dim") else size
            _set(config, key, min(value, size))
    if is_wide:
        return config
    for key, size in {**(LATENT if hasattr(config, "kv_lora_rank") else {}), **STATES}.items():
        if vars(config).get(key) is not None and not isinstance(vars(config)[key], bool):
            _set(config, key, size)
    return config


def _set(config: Any, key: str, value: Any) -> None:
    try:
        setattr(config, key, value)
    except Exception:  # a property of another one
        return


def build(name: str, kind: str, layers: int, rope: int, is_wide: bool, dtype: torch.dtype) -> Any:
    model_class: Any = getattr(transformers, kind)
    config: Any = CONFIG_MAPPING[name]()
    if not isinstance(config, model_class.config_class):
        config = model_class.config_class()
    config = small(config, layers, rope, is_wide)
    with torch.device("meta"):
        if sum(p.numel() for p in model_class(config).parameters()) > (MOST_WIDE if is_wide else MOST_PARAMETERS):
            raise MemoryError("too large")
    torch.manual_seed(7)
    model = model_class(config).eval().to(dtype)
    for p in model.parameters():  # biases and gains that tell themselves from zeros and ones
        if p.dim() == 1:
            p.data += 0.1 * torch.randn(p.shape, dtype=dtype)
    return model


def inputs(model: Any, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    real = lambda *shape: torch.randn(shape, generator=generator, dtype=dtype)  # noqa: E731
    ids, main, config = torch.randint(3, 80, (4, 8), generator=generator), model.main_input_name, model.config
    channels = getattr(config, "num_channels", None) or getattr(config, "in_channels", None) or 3
    takes = inspect.signature(model.forward).parameters
    if "grid_thw" in takes:  # images as rows of patches, of several sizes
        grid, patch = torch.tensor([[1, 4, 4], [1, 4, 8]]), getattr(config, "patch_size", 4)
        for each in (channels * patch * patch * getattr(config, "temporal_patch_size", 1), channels * patch * patch):
            yield {next(iter(takes)): real(48, each), "grid_thw": grid}
        yield {next(iter(takes)): real(48, channels, patch, patch), "grid_thw": grid}
    elif main == "pixel_values":
        for side in (16, 32, 64):
            yield {main: real(4, channels, side, side)}
        yield {main: real(4, 3, 16, 16), "input_ids": ids}
        for side in (16, 32):
            yield {main: real(2, getattr(config, "num_frames", 4), channels, side, side)}
    elif main in ("input_values", "input_features", "past_values", "pixel_values_videos"):
        mel = next((getattr(config, key) for key in MELS if isinstance(getattr(config, key, None), int)), 8)
        length = getattr(config, "context_length", 16)
        for shape in ((400,), (1600,), (1024, 128), (8, 12), (80, 3000), (100, 80), (128, mel), (mel, 128), (mel, 3000),
                      (1, 1600), (length, getattr(config, "num_input_channels", 1)), (4, 3, 16, 16)):  # fmt: skip
            yield {main: real(4, *shape)}
        yield {main: real(4, 128, mel), "decoder_input_ids": ids}
    elif isinstance(main, str):
        more = {"decoder_input_ids": ids.flip(1)} if "decoder_input_ids" in takes else {}
        yield {main: ids, **more}
        yield {main: ids, **more, "pixel_values": real(4, 3, 16, 16)}
        yield {main: ids, **more, "bbox": torch.randint(0, 30, (4, 8, 4), generator=generator).sort().values}


def tensors(x: Any) -> list[Tensor]:
    if isinstance(x, Tensor):
        return [x] if x.is_floating_point() and x.numel() else []
    if hasattr(x, "items"):
        return [y for key, v in x.items() if not any(w in key for w in ("past", "mems", "cache")) for y in tensors(v)]
    return [y for v in x for y in tensors(v)] if isinstance(x, (list, tuple)) else []


def whole(x: Any) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x.gathered() if hasattr(x, "gathered") else x


def score(model: Any, given: dict[str, Tensor]) -> tuple[list[Tensor], Tensor]:
    """What a model gives, and a number made of all of it."""
    torch.manual_seed(5)
    random.seed(5)
    out = [whole(x) for x in tensors(model(**given))]
    generator = torch.Generator().manual_seed(11)
    parts = [(x * torch.randn(tuple(x.shape), generator=generator, dtype=torch.float64)).sum() for x in out]
    return out, sum(parts)  # type: ignore[return-value]


def far(found: Tensor, wanted: Tensor, rtol: float, atol: float) -> str:
    if not wanted.numel():
        return ""
    error, scale = (found - wanted).abs().max().item(), wanted.abs().max().item()
    return "" if error <= rtol * scale + atol else f"{error:.1e} of {scale:.1e}"


def dense_of(name: str, kind: str) -> tuple[Any, ...] | str:
    """The first way in which a small model runs: the model, the way, its inputs, and what it gives; or why there is
    none.
    """
    why = ""
    for way in WAYS:
        try:
            dense = build(name, kind, *way)
        except Exception as error:  # whatever a config that was made small leads to
            why = f"{type(error).__name__}: {str(error)[:80]}"
            continue
        for given in inputs(dense, way[-1]):
            dense.zero_grad()
            try:
                out, number = score(dense, given)
                number.backward()
            except Exception as error:  # as above
                why = f"{type(error).__name__}: {str(error)[:80]}"
                continue
            if math.isfinite(number) and all(p.grad is None or p.grad.isfinite().all() for p in dense.parameters()):
                return dense, way, given, out
            why = "it gives numbers that are not finite"
    return why


def compare(name: str, kind: str, sizes: dict[str, int], scheme: str) -> dict[str, Any]:
    """One type; runs on every rank."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    row: dict[str, Any] = {"class": kind}
    found = dense_of(name, kind)
    if isinstance(found, str):
        return row | {"verdict": "no dense", "why": found}
    dense, way, given, expected = found
    times = 1 if way[-1] == torch.float64 else 3000
    row |= {"layers": way[0], "dtype": str(way[-1]).removeprefix("torch.")}
    model = build(name, kind, *way)
    try:
        model = ndtp.parallelize(model, ndtp.ProcessGrid(Grid(sizes)), scheme=scheme, strict=False)
        out, number = score(model, given)
        number.backward()
        differs = _differences(model, dense, out, expected, times)
        if not differs and model.can_generate() and set(given) == {"input_ids"}:
            options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
            tokens = _generated(dense, given["input_ids"], options)
            if tokens is not None and not torch.equal(model.generate(given["input_ids"], **options), tokens):
                differs = ["other tokens"]
    except ndtp.LayoutError as error:
        return row | {"verdict": "refused", "why": str(error)[:300]}
    except Exception as error:  # what this program is for
        return row | {"verdict": "broken", "why": f"{type(error).__name__}: {str(error)[:300]}"}
    total, split, _ = model.ndtp_report.parameters
    row["split"] = round(split / total, 3)
    return row | ({"verdict": "wrong", "why": "; ".join(differs[:3])} if differs else {"verdict": "equal"})


def _differences(model: Any, dense: Any, out: list[Tensor], expected: list[Tensor], times: float) -> list[str]:
    if [x.shape for x in out] != [x.shape for x in expected]:
        return ["outputs of other sizes"]
    pairs = enumerate(zip(out, expected, strict=True))
    found = {f"output {i}": far(x, y, 5e-6 * times, 1e-9 * times) for i, (x, y) in pairs}
    for (key, p), q in zip(model.named_parameters(), dense.parameters(), strict=True):
        mine = torch.zeros_like(q) if p.grad is None else as_dense(whole(p.grad), q)
        found[f"gradient of {key}"] = far(
            mine, torch.zeros_like(q) if q.grad is None else q.grad, 1e-5 * times, 1e-7 * times
        )
    return [f"{where} {text}" for where, text in found.items() if text]


def _generated(dense: Any, ids: Tensor, options: dict[str, Any]) -> Tensor | None:
    try:
        return dense.generate(ids, **options)  # type: ignore[no-any-return]
    except Exception:  # it generates nothing of these alone
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", default="x=2")
    parser.add_argument("--scheme", default="1d-sp")
    parser.add_argument("--types", nargs="*")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--seconds", type=float, default=300.0, help="for a type, until it is called broken")
    arguments = parser.parse_args()
    sizes = {axis: int(size) for axis, size in (part.split("=") for part in arguments.grid.split(","))}
    where = f"{arguments.grid} {arguments.scheme}"
    record: dict[str, Any] = {"versions": {}, "counts": {}, "rows": {}}
    if arguments.json and arguments.json.exists():
        record = json.loads(arguments.json.read_text())
    record["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    rows = record["rows"].setdefault(where, {})
    for name, kind in types().items():
        done = rows.get(name, {}).get("verdict")
        if (arguments.types and name not in arguments.types) or done == "equal" or (done and not arguments.again):
            continue
        begin, given = time.monotonic(), (name, kind, sizes, arguments.scheme)
        try:
            row = ndtp.testing.run(compare, math.prod(sizes.values()), args=given, timeout=arguments.seconds)[0]
        except ndtp.testing.RankError as error:
            row = {"class": kind, "verdict": "broken", "why": str(error)[:300]}
        print(f"{name:30} {row['verdict']:9} {time.monotonic() - begin:5.1f} s  {row.get('why', '')}", flush=True)
        rows[name] = row
        record["counts"][where] = dict(Counter(row["verdict"] for row in rows.values()))
        if arguments.json:
            arguments.json.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    print(record["counts"].get(where))
    sys.exit(any(row["verdict"] in ("wrong", "broken") for row in rows.values()))


if __name__ == "__main__":
    main()
