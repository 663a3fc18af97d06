"""`ndtp export`: a checkpoint of a training run as the folder that transformers and vLLM load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ndtp.cli.common import JsonOption, console, dtype_of, must_be, write_json
from ndtp.cli.train_log import LOG
from ndtp.planner.fields import Number

CHECKPOINT, CONFIG, TOKENIZER = "checkpoint", "config.json", "tokenizer"  # of an output of ndtp train


def export(
    run: Annotated[
        Path, typer.Argument(metavar="DIR", help="An output of ndtp train, or a folder of ndtp.checkpoint.save.")
    ],
    output: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write.")],
    model: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="The model's config.json, or its folder. Default: that of the run."),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="PATH", help="A folder or a tokenizer.json, whose tokenizer goes along.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(callback=dtype_of("same", "float32", "bfloat16", "float16"), help="Of the weights.")
    ] = "same",
    file_gb: Annotated[
        float, typer.Option(callback=must_be(Number(1e-3, 1000)), help="Size of one file at most, in GB.")
    ] = 5.0,
    json_file: JsonOption = None,
) -> None:
    """Write a trained model as the folder that transformers and vLLM load.

    Takes the checkpoint of a run on any grid, on one process and without its grid.
    The folder has config.json, generation_config.json, safetensors files with their
    index, and the tokenizer. Exit status: 0, or 2 where the run has no such model.

    Example: ndtp export train_output --output served --dtype bfloat16
    """
    import torch

    from ndtp.checkpoints.pretrained import save_pretrained
    from ndtp.checkpoints.training_state import load
    from ndtp.cli.train_data import DataError, load_tokenizer
    from ndtp.errors import CheckpointError, CommunicationError

    out = console(json_file)
    folder = run / CHECKPOINT if (run / CHECKPOINT).exists() or (run / f"{CHECKPOINT}.before").exists() else run
    tokenizer = tokenizer or (run / TOKENIZER if (run / TOKENIZER).is_dir() else None)
    try:
        module = _empty(_config_of(run, model), folder)
        goes_along: Any = None if tokenizer is None else load_tokenizer(tokenizer)
        load(module, None, folder)
        save_pretrained(
            module, output, goes_along, dtype=None if dtype == "same" else getattr(torch, dtype),
            file_bytes=int(file_gb * 1e9),
        )  # fmt: skip
    except DataError as error:
        raise typer.BadParameter(str(error), param_hint="--tokenizer") from None
    except CheckpointError as error:
        raise typer.BadParameter(str(error), param_hint="DIR") from None
    except CommunicationError as error:
        raise typer.BadParameter(str(error), param_hint="--output") from None
    count = sum(p.numel() for p in module.parameters())
    out.print(f"{output}: {type(module).__name__} of {count:,} parameters", highlight=False)
    write_json(json_file, {"output": str(output), "class": type(module).__name__, "parameters": count})


def _config_of(run: Path, model: Path | None) -> Path:
    """Return the config file of the model that a run has trained."""
    path = run / CONFIG if model is None else model / CONFIG if model.is_dir() else model
    if path.is_file():
        return path
    if model is not None:
        raise typer.BadParameter(f"{path} is no file", param_hint="--model")
    what = "a run of ndtp train without --model has a byte-level model, which no other program has"
    if not (run / LOG).exists():
        what = f"{run} has no {CONFIG}; name the model's own" if run.exists() else f"{run}: there is no such folder"
    raise typer.BadParameter(what, param_hint="--model" if run.exists() else "DIR")


def _empty(config: Path, folder: Path) -> Any:
    """Return the dense model of a config, with memory for the tensors of a checkpoint and of their dtype."""
    import torch

    from ndtp.checkpoints import folder as folders
    from ndtp.checkpoints.from_meta import materialise

    try:
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    except ImportError:
        raise typer.BadParameter(
            "models are made by transformers; pip install 'ndtp[transformers]'", param_hint="--model"
        ) from None
    tensors = folders.read(folders.complete(folder)).tensors
    dtypes = [x.dtype for key, x in tensors.items() if key.startswith("model.") and x.dtype.is_floating_point]
    dtype = max(dtypes, key=dtypes.count, default=torch.float32)
    try:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config), dtype=dtype)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise typer.BadParameter(f"{config}: {error}", param_hint="--model") from None
    materialise(module, "cpu")
    if (config.parent / "generation_config.json").is_file():
        module.generation_config = GenerationConfig.from_pretrained(config.parent)
    return module
