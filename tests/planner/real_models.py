"""How `ndtp.planner.model_config` reads architectures, against the models that transformers builds of their configs.

    python tests/planner/real_models.py [--only llama bart ...] [--write]

Each known family is built without memory, of its default sizes: the weights of the Linears in its lists of layers, its
embedding and its head must have as many elements as the planner says.  `--write` looks through all families that
transformers has, takes those that one reading fits to the last weight, and writes `model_families.py`.  Minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
import warnings
from collections import Counter
from pathlib import Path
from unittest import mock

import torch
from torch import nn

import ndtp.planner.model_config as reading
from ndtp.errors import GridError
from ndtp.planner import model_families

ORDER = ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ", "CAUSAL_LM", "MASKED_LM", "")
NAMES = ("GATED", "PLAIN", "ENCODER_DECODERS", "WITHOUT_VOCABULARY")


def config_of(kind: str):
    """A family's default config."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return getattr(transformers, CONFIG_MAPPING_NAMES[kind])()


def built(kind: str, config):
    """The model of a config, on the meta device, and that config as a file would hold it."""
    import transformers
    from transformers.models.auto import modeling_auto

    error: Exception = LookupError("no model of it")
    for task in ORDER:
        mapping = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES" if task else "MODEL_MAPPING_NAMES")
        if kind not in mapping or (task.startswith("S") and not config.is_encoder_decoder):
            continue
        name = mapping[kind] if isinstance(mapping[kind], str) else mapping[kind][0]
        try:
            with torch.device("meta"):
                model = getattr(transformers, name)(config)
            model.tie_weights()
        except Exception as problem:  # a class that wants more than its config
            error = problem
            continue
        return model, json.loads(json.dumps(config.to_dict(), default=str)) | {"architectures": [name]}
    raise error


def counts(model) -> dict:
    """Of each list of layers its length and the elements of its Linears; shapes of the embedding and the head."""
    from transformers.pytorch_utils import Conv1D

    linear = (nn.Linear, Conv1D)
    lists, shapes = [], Counter()
    for layers in _lists(model):
        inside = [m for m in layers.modules() if isinstance(m, linear)]
        lists.append((len(layers), sum(m.weight.numel() for m in inside)))
        shapes.update(tuple(m.weight.shape if isinstance(m, nn.Linear) else reversed(m.weight.shape)) for m in inside)
    table, head = _of(model, "get_input_embeddings", nn.Embedding), _of(model, "get_output_embeddings", linear)
    return {
        "layers": sorted(found for found in lists if found[1]),
        "shapes": shapes,
        "embedding": None if table is None else tuple(table.weight.shape),
        "head": None if head is None else tuple(head.weight.shape),
        "tied": table is not None and head is not None and head.weight is table.weight,
    }


def _of(model, method: str, kinds):
    try:
        found = getattr(model, method)()
    except (AttributeError, NotImplementedError):
        return None
    return found if isinstance(found, kinds) else None


def _lists(module: nn.Module):
    for child in module.children():
        if isinstance(child, nn.ModuleList) and len(child) > 1:
            yield child
        else:
            yield from _lists(child)


def difference(real: dict, config: dict) -> str | None:
    """What is read wrong of a config, if anything."""
    sizes = reading.sizes_of(config)
    layers = sorted((s.layers, sum(b.times * b.parameters for b in s.blocks(1))) for s in sizes.stacks)
    if layers != real["layers"]:
        return f"layers {layers} instead of {real['layers']}"
    # Sums alone may be those of other layers: cross attention weighs as much as a gate, at some sizes.
    ups = {(stack.ffn, stack.hidden): 0 for stack in sizes.stacks}
    for stack in sizes.stacks:
        ups[stack.ffn, stack.hidden] += stack.layers * (1 + stack.gated)
    for (ffn, hidden), wanted in ups.items():
        found = real["shapes"][ffn, hidden] + 2 * real["shapes"][2 * ffn, hidden]
        if found < wanted:  # more, where projections of heads are as wide
            return f"{found} Linears from {hidden} to {ffn} features instead of {wanted}"
    table = (sizes.vocabulary, sizes.width) if sizes.vocabulary else None
    if table != real["embedding"]:
        return f"embedding {table} instead of {real['embedding']}"
    if sizes.head != (real["head"] is not None) or (sizes.head and real["head"] != table):
        return f"head of {table if sizes.head else None} instead of {real['head']}"
    if sizes.head and sizes.tied != real["tied"]:
        return f"tied: {sizes.tied} instead of {real['tied']}"
    return None


def lists_for(kind: str, real: dict, config: dict) -> list[str] | None:
    """In which of the lists a family belongs, so that it is read right; None where no choice does that."""
    both = [name for name in ("ENCODER_DECODERS",) if config.get("is_encoder_decoder")]
    for gate in ("PLAIN", "GATED"):
        for rest in ([], ["WITHOUT_VOCABULARY"]):
            chosen = [gate, *both, *rest]
            lists = {name: (kind,) if name in chosen else () for name in NAMES}
            plain = {key: value for key, value in config.items() if key != "feed_forward_proj"}
            with mock.patch.multiple(reading, **lists):
                try:
                    if difference(real, plain) is None:
                        return chosen
                except GridError:
                    continue
    return None


def write(found: dict[str, list[str]]) -> None:
    path = Path(model_families.__file__)
    head = path.read_text().split("# -- ")[0]
    parts = []
    for name in NAMES:
        words = " ".join(f'"{kind}",' for kind, lists in sorted(found.items()) if name in lists)
        lines = textwrap.wrap(words, 112, break_on_hyphens=False, initial_indent="    ", subsequent_indent="    ")
        parts.append(f"{name} = (\n" + "\n".join(lines) + "\n)  # fmt: skip\n")
    path.write_text(head + "# -- written by tests/planner/real_models.py\n\n" + "\n".join(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    known = [*model_families.GATED, *model_families.PLAIN]
    found, wrong = {}, 0
    for kind in arguments.only or (CONFIG_MAPPING_NAMES if arguments.write else known):
        try:
            config = config_of(kind)
            if config.model_type != kind or hasattr(config, "text_config"):
                continue
            if any((getattr(config, name, None) or 0) > 1 for name in reading.EXPERTS):
                continue
            model, config = built(kind, config)
        except Exception as error:
            print(f"{kind}: not built, {type(error).__name__}: {str(error)[:80]}", flush=True)
            continue
        real = counts(model)
        chosen = lists_for(kind, real, config)
        if chosen:
            found[kind] = chosen
        if kind in known and (problem := difference(real, config)):
            wrong += 1
            print(f"{kind}: {problem}", flush=True)
        elif arguments.write:
            print(f"{kind}: {chosen or 'no reading fits'}", flush=True)
    print(f"{len(found)} families read right" + f", {wrong} of those known wrong" * (not arguments.write))
    if arguments.write:
        write(found)
    sys.exit(1 if wrong and not arguments.write else 0)


if __name__ == "__main__":
    main()
