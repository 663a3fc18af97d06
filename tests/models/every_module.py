"""Torch's own samples of its modules, each between two Linears of a split model, compared with dense.

    pip install expecttest
    python tests/models/every_module.py [--grid x=2,y=2] [--json bench/results/torch_modules.json]

Compared in fp64, in training and in evaluation, are what the model gives, the gradients of all parameters, and buffers.
It takes ten minutes on two cores.  Modules that take no floating matrix are left out.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # of `products`

import torch
from products import mesh_of
from recorded import axes_of, whole
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import ndtp
import ndtp.testing

AT_ONCE, SAMPLES = 4, 4  # modules in one call of the ranks, samples of each


class Between(nn.Module):
    """A module whose first input a Linear gives, and whose result another one takes where it is a floating matrix."""

    def __init__(self, inner: nn.Module, width: int, out: int) -> None:
        super().__init__()
        self.before, self.inner = nn.Linear(width, width), inner
        self.after = nn.Linear(out, out) if out else nn.Identity()

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.after(self.inner(self.before(x), *args, **kwargs))


def modules() -> list[Any]:
    from torch.testing._internal.common_modules import module_db

    return module_db


def is_matrix(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1 and x.shape[-1] > 1


def real(x: Tensor) -> Tensor:
    x = whole(x.detach())
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def results(model: nn.Module, args: list[Any], kwargs: dict[str, Any]) -> list[Tensor | None]:
    """Outputs, gradients and buffers."""
    torch.manual_seed(5)
    out = model(*copy.deepcopy(args), **kwargs)
    generator, total = torch.Generator().manual_seed(0), torch.zeros(())
    for y in tree_leaves(out):
        if isinstance(y, Tensor) and y.requires_grad:
            total = total + (whole(y) * torch.randn(y.shape, generator=generator)).sum()
    found: list[Tensor | None] = [real(y) for y in tree_leaves(out) if isinstance(y, Tensor)]
    if total.requires_grad:
        total.backward()
        found += [None if p.grad is None else real(p.grad) for p in model.parameters()]
    return found + [real(b) for b in model.buffers()]


def differs(mine: list[Tensor | None], theirs: list[Tensor | None]) -> str:
    if len(mine) != len(theirs):
        return f"{len(mine)} tensors, not {len(theirs)}"
    for i, (x, y) in enumerate(zip(mine, theirs, strict=True)):
        if (x is None) != (y is None):
            return f"{i} of {len(mine)}: {'none' if x is None else 'one'}"
        if x is None or y is None:
            continue
        x = x[tuple(map(slice, y.shape))]  # padding
        if x.shape != y.shape or not torch.allclose(x, y, rtol=1e-6, atol=1e-8, equal_nan=True):
            return f"{i} of {len(mine)}"
    return ""


def one(info: Any, sample: Any, training: bool, axes: dict[str, int]) -> str | None:
    """The verdict; None where the sample cannot stand between two Linears."""
    torch.manual_seed(1)
    args, kwargs = list(sample.forward_input.args), sample.forward_input.kwargs
    if not args or not is_matrix(args[0]):
        return None
    try:
        inner = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs).train(training)
        given = inner(*copy.deepcopy(args), **kwargs)
        dense = Between(inner, args[0].shape[-1], given.shape[-1] if is_matrix(given) else 0).train(training)
        model = copy.deepcopy(dense)
        expected = results(dense, args, kwargs)
    except Exception as error:
        return f"no dense: {type(error).__name__}"
    try:
        ndtp.parallelize(model, mesh_of(ndtp.Grid(axes)))
        wrong = differs(results(model, args, kwargs), expected)
    except (ndtp.LayoutError, ndtp.GridError) as error:
        return f"refused: {str(error).splitlines()[0]}"
    except Exception as error:
        return f"broken: {type(error).__name__}: {error}"
    return f"wrong: {wrong}" if wrong else "equal"


def compare(first: int, axes: dict[str, int]) -> list[tuple[str, str]]:
    """What became of the samples of a few modules, on every rank alike."""
    warnings.simplefilter("ignore")
    torch.set_default_dtype(torch.float64)
    found = []
    try:
        for info in modules()[first : first + AT_ONCE]:
            for training in (True, False):
                samples = info.module_inputs_func(
                    info, device="cpu", dtype=torch.float64, requires_grad=False, training=training
                )
                for number, sample in enumerate(samples[:SAMPLES]):
                    said = None if sample.forward_input is None else one(info, sample, training, axes)
                    if said is not None:
                        found.append((f"{info.name} {number} {'training' if training else 'evaluation'}", said))
    finally:
        torch.set_default_dtype(torch.float32)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--grid", default="x=2,y=2", help="axes and their sizes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    axes, number = axes_of(options.grid), len(modules())
    ranks, counts, odd = ndtp.Grid(axes).num_ranks, Counter[str](), []
    for first in range(0, number, AT_ONCE):
        for name, said in ndtp.testing.run(compare, ranks, args=(first, axes), timeout=200)[0]:
            verdict = said.partition(":")[0]
            counts[verdict] += 1
            if verdict not in ("equal", "no dense"):
                odd.append(f"{name}: {said}")
                print(odd[-1][:300], flush=True)
    print(f"{number} modules: {dict(counts)}")
    if options.json:
        record = {
            "torch": torch.__version__,
            "grid": options.grid,
            "modules": number,
            "samples": dict(counts),
            "odd": odd,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return int(bool(counts["wrong"] or counts["broken"]))


if __name__ == "__main__":
    sys.exit(main())
