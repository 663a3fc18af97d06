"""The model of `ndtp train --model`, checked before any rank is started: its class, its causality, its positions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ndtp.cli.export import CONFIG
from ndtp.planner.fields import reason, shown

if TYPE_CHECKING:
    from collections.abc import Sequence

OF_NO_STEP = (
    "transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype", "use_cache", "bos_token_id",
    "eos_token_id",
)  # fmt: skip


def config_file(path: Path | None) -> Path | None:
    """Return the config.json that a path names, by itself or by its folder.

    Raises:
        typer.BadParameter: a folder without a config.json.
    """
    if path is None or not path.is_dir():
        return path
    if not (path / CONFIG).is_file():
        raise _wrong(f"{path} is a folder without a {CONFIG}; fix: the path of a model's {CONFIG}, or of its folder")
    return path / CONFIG


def check_model(path: Path, context: int, sample: int, start: Sequence[int]) -> int | None:
    """Check that a model can be trained on sequences of `context` tokens; return the size of its vocabulary.

    Args:
        sample: the number of tokens that the trained model is to make, behind those of `start`.

    Raises:
        typer.BadParameter: no config, no causal language model, or fewer positions than that takes.
    """
    _check_content(path)
    kind, config = _class_and_config(path)
    from ndtp.models.trial import most_tokens, named_positions, sees_later_tokens, text_config

    if sees_later_tokens(kind, config):
        of_encoder = getattr(config, "is_decoder", None) is False
        fix = "is_decoder=true in the config" if of_encoder else "the config of a model whose tokens see earlier ones"
        raise _wrong(
            f"{path}: in {kind.__name__} each token sees the tokens behind it, which it is to predict; fix: {fix}"
        )
    # A step's sequences have a token more than --context; the last token that is made is not read again.
    needed = {"--context": context + 1, "--sample": len(start) + sample - 1 if sample else 0}
    most = most_tokens(kind, config, max(needed.values()))
    if most is not None:
        name, value = named_positions(config) or ("", most)
        larger = f"a larger {name} than {value} in {path}"
        if needed["--context"] > most:
            raise typer.BadParameter(
                f"a step reads {context} tokens and the one behind them, {kind.__name__} takes {most}; "
                f"fix: --context {max(1, most - 1)}, or {larger}", param_hint="--context",
            )  # fmt: skip
        if needed["--sample"] > most:
            raise typer.BadParameter(
                f"{sample} tokens behind the {len(start)} of the prompt take {needed['--sample']} positions, "
                f"{kind.__name__} takes {most}; fix: --sample {max(0, most - len(start) + 1)}, or {larger}",
                param_hint="--sample",
            )  # fmt: skip
    return getattr(text_config(config), "vocab_size", None)


def same_model(before: dict[str, Any], now: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what two configs tell of their models, with the defaults of the transformers at hand, where it is other.

    Fields that change no step are left out: names of files, versions, and what is for making text.
    """
    from transformers import CONFIG_MAPPING

    kind = now["model_type"]
    if before.get("model_type") == kind and kind in CONFIG_MAPPING:
        before, now = (CONFIG_MAPPING[kind].from_dict(each).to_dict() for each in (before, now))
    names = [name for name in {**before, **now} if name not in OF_NO_STEP and before.get(name) != now.get(name)]
    return {name: before.get(name) for name in names}, {name: now.get(name) for name in names}


def _class_and_config(path: Path) -> tuple[type, object]:
    """The class of a causal language model that transformers has for a config, and the config that the class takes."""
    try:
        import transformers
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise _wrong("models are made by transformers; pip install 'ndtp[transformers]'") from None
    import torch

    from ndtp.models.counted import first_line, knows, quiet

    content = json.loads(path.read_bytes())
    kind = shown(content["model_type"])
    if not knows(content):
        raise _wrong(
            f"{path}: transformers {transformers.__version__} knows no model_type={kind}; "
            "fix: the model_type of a model that it has, or a later transformers"
        )
    with quiet(transformers):
        try:
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        except Exception as error:
            raise _wrong(f"{path}: transformers takes no such config of {kind}: {first_line(error)}") from None
        if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            raise _wrong(
                f"{path}: model_type={kind} has no causal language model in transformers {transformers.__version__}, "
                "which ndtp train takes; fix: the config of a decoder, such as llama or gpt2"
            )
        try:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        except Exception as error:
            raise _wrong(f"{path}: transformers builds no model of {kind}: {first_line(error)}") from None
    return type(model), model.config


def _check_content(path: Path) -> None:
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        raise _wrong(f"{path} cannot be read: {reason(error)}") from None
    try:
        kind = json.loads(content).get("model_type")
    except (ValueError, AttributeError, RecursionError):
        kind = None
    if not isinstance(kind, str):
        raise _wrong(f"{path} is no {CONFIG} of transformers, an object with a model_type")


def _wrong(message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint="--model")
