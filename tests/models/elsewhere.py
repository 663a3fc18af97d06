"""Models of others, which no test names one by one, split by `ndtp.parallelize` alone, against dense.

    pip install --no-deps --target SITE timm diffusers ...    # whatever of `zoo/packages.py` is to be compared
    PYTHONPATH=SITE python tests/models/elsewhere.py [--grid x=2,y=2 --scheme 3d] [--models "timm*" "*LSTM*"]
        [--json bench/results/models_elsewhere.json [--again [wrong ..]]]

`tests/models/zoo` has the models: written as people write them, and tiny ones of packages; those whose package is not
here are left out.  Compared are what a call gives in training, the gradients of all parameters, parameters and buffers
after a step of an optimizer, what the model gives in evaluation then, and a second batch of another size with its
gradients.  With --json, rows of the file are kept and the run goes on.  A model is

    equal     within 1e-4 of dense, relative to the largest number of a tensor (for gradients, of all within 1e-2),
    drift     no more than ten times as far off as dense itself is with its weights off by their last bit, where the
              model does not run in fp64; else fp64 decides,
    wrong     further off, or it gives something that dense does not give,
    refused   by ndtp's own error in `parallelize`, or in the first call of a model that waits for it,
    stopped   by ndtp's own error later,
    broken    whatever else it raises, or a timeout,
    no dense  where the dense model does not run here.
"""

from __future__ import annotations

import copy
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # of `products`

import torch
import zoo.generative
import zoo.images
import zoo.libraries
import zoo.others
import zoo.packages
import zoo.sequences  # noqa: F401  # which put their models into ALL
from products import mesh_of
from recorded import RATE, axes_of, campaign, compared, decided, parser_of, using, whole
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from zoo.entry import ALL, Entry

import ndtp
import ndtp.testing
from ndtp import CommMeter
from ndtp.testing.device import TEST_DEVICE, _DrawnWhereTheGeneratorIs, use_test_device

DEVICE = os.environ.get(TEST_DEVICE) or "cpu"
# Of verdicts, the worst last.
ORDER = ["equal", "drift", "refused", "no dense", "stopped", "wrong", "broken"]


def tensors_in(x: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The floating tensors of what a model gives, by their path; complex ones as pairs of real ones."""
    if isinstance(x, Tensor):
        if x.is_floating_point() or x.is_complex():
            yield name, x
    elif isinstance(x, Mapping):
        for key, value in x.items():
            yield from tensors_in(value, f"{name}.{key}")
    elif isinstance(x, (list, tuple)):
        for i, value in enumerate(x):
            yield from tensors_in(value, f"{name}[{i}]")
    elif is_dataclass(x):
        for each in fields(x):
            yield from tensors_in(getattr(x, each.name, None), f"{name}.{each.name}")


def real(x: Tensor) -> Tensor:
    x = whole(x.detach())
    x = x.full_tensor() if hasattr(x, "full_tensor") else x
    return (torch.view_as_real(x) if x.is_complex() else x).cpu().clone()


def scalar(out: Any) -> Tensor:
    """The sum of all that a model gives with fixed random factors; a number counts as it is."""
    generator, total = torch.Generator().manual_seed(0), torch.zeros((), device=DEVICE)
    for _, x in tensors_in(out):
        if x.requires_grad:
            x = torch.view_as_real(x) if x.is_complex() else x
            factors = torch.randn(x.shape, generator=generator) if x.dim() else torch.ones(())
            total = total + (whole(x) * factors.to(x)).sum()
    return total


def called(model: nn.Module, given: Any) -> Any:
    torch.manual_seed(7)
    random.seed(7)
    given = copy.deepcopy(given)
    return model(**given) if isinstance(given, dict) else model(*given)


def results(model: nn.Module, each: Entry, about: dict[str, Any] | None = None) -> dict[str, Tensor]:
    """Whatever is compared, as whole tensors by name; a collective on a grid.

    Args:
        about: takes what the first step sent.
    """
    found: dict[str, Tensor] = {}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE)
    for turn, batch in enumerate(each.batches):
        torch.manual_seed(3)
        given = tree_map_only(Tensor, lambda x: x.to(DEVICE), each.inputs(batch))
        model.train()
        optimizer.zero_grad()
        with CommMeter() as meter:
            out = called(model, given)
            scalar(out).backward()
        if about is not None and not turn:
            about["bytes"] = meter.volume.by("collective")
        found |= {f"training {turn}{name}": real(x) for name, x in tensors_in(out)}
        for name, p in model.named_parameters():
            if p.grad is not None:
                found[f"gradient {turn} of {name}"] = real(p.grad)
        optimizer.step()
        if not turn:
            model.eval()
            with torch.no_grad():
                found |= {f"evaluation{name}": real(x) for name, x in tensors_in(called(model, given))}
    found |= {f"parameter {name}": real(p) for name, p in model.named_parameters()}
    return found | {f"buffer {name}": real(b) for name, b in model.named_buffers() if b.is_floating_point()}


def made(each: Entry) -> nn.Module:
    torch.manual_seed(1)
    random.seed(1)  # by which some draw
    return each.make().to(DEVICE)


def nearby(each: Entry) -> list[dict[str, Tensor]]:
    """What dense gives with its weights off by their last bit, twice."""
    found = []
    for turn in range(2):
        model = made(each)
        torch.manual_seed(turn)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.0 + torch.randn_like(p) * torch.finfo(p.dtype).eps)
        found.append(results(model, each))
    return found


def compare(mine: dict[str, Tensor], dense: dict[str, Tensor], also: list[dict[str, Tensor]]) -> dict[str, Any]:
    """The verdict, and the tensor that is furthest off; see `recorded.compared`."""
    verdict, worst, off = compared(mine, dense, also)
    return {"verdict": verdict, "off": max(off.values()), "worst": worst}


@contextmanager
def default_device() -> Iterator[None]:
    with torch.device(DEVICE), _DrawnWhereTheGeneratorIs():
        yield


def dense_of(each: Entry, dtype: torch.dtype, path: str, moved: bool = False) -> None:
    """Put what the dense model gives into a file, and with `moved` what it gives with other last bits of its weights.

    It runs in this process: some packages' code looks for other ranks, which the dense model must not find.  Where its
    own code makes tensors without a device, the default device is that of the model.
    """
    with using(dtype), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with torch.device("cpu") if DEVICE != "cpu" else nullcontext():  # no default device
                found = results(made(each), each)
            is_default = False
        except RuntimeError:
            if DEVICE == "cpu":
                raise
            is_default = True
            with default_device():
                found = results(made(each), each)
        with default_device() if is_default else nullcontext():
            torch.save((found, nearby(each) if moved else [], is_default), path)


def on_grid(name: str, axes: dict[str, int], scheme: str, dtype: torch.dtype, path: str) -> dict[str, Any]:
    """One model on every rank: what `compare` says, and what the report does."""
    torch.set_num_threads(1)
    each = ALL[name]
    dense, also, is_default = torch.load(path, map_location="cpu")
    torch.set_default_device(None)  # models and inputs are moved to the device, as users do
    row: dict[str, Any] = {"split": 0.0}
    with using(dtype), warnings.catch_warnings(), default_device() if is_default else nullcontext():
        warnings.simplefilter("ignore")
        model = made(each)
        try:
            ndtp.parallelize(model, mesh_of(ndtp.Grid(axes)), scheme=scheme)
            about: dict[str, Any] = {}
            mine = results(model, each, about)
        except (ValueError, NotImplementedError) as error:
            if not type(error).__module__.startswith("ndtp"):
                raise
            report = getattr(model, "ndtp_report", None)
            is_dense = report is None or report.waits or not report.replaced
            return row | {"verdict": "refused" if is_dense else "stopped", "error": str(error)}
        report = model.ndtp_report
        total, split, held = report.parameters
        row |= {"split": round(split / max(total, 1), 3), "held": round(held / max(total, 1), 3)}
        row |= about | {"gathered": dict(report.gathered), "kept": len(report.kept)}
        return row | compare(mine, dense, also)


def worst_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the rank says that found the worst."""
    return max(rows, key=lambda row: ORDER.index(row["verdict"]))


def one_model(pool: ndtp.testing.RankPool, name: str, axes: dict[str, int], scheme: str, timeout: float) -> dict:
    path = os.path.join(tempfile.gettempdir(), f"ndtp-elsewhere-{os.getpid()}")

    def asked(dtype: torch.dtype, moved: bool) -> dict[str, Any]:
        try:
            dense_of(ALL[name], dtype, path, moved)
        except Exception as error:
            return {"verdict": "no dense", "error": f"{type(error).__name__}: {error}"[:300]}
        return worst_of(pool.run(on_grid, name, axes, scheme, dtype, path, timeout=timeout))

    try:
        return decided(asked)
    finally:
        Path(path).unlink(missing_ok=True)


def described(name: str, row: dict) -> str:
    why = (row.get("error") or row.get("worst") or "").replace("\n", " ")[:200]
    total = sum(row.get("bytes", {}).values())
    return f"{name:60} {row['verdict']:8} {row.get('split', 0.0):6.1%} {total:>9,} {why}".rstrip()


def main() -> None:
    parser = parser_of(__doc__, "3d", 300)
    parser.add_argument("--models", nargs="*", default=["*"], help="patterns of their names")
    arguments = parser.parse_args()
    use_test_device()
    torch.set_default_device(None)
    axes = axes_of(arguments.grid)
    ranks = 1
    for size in axes.values():
        ranks *= size
    with ndtp.testing.RankPool(ranks) as pool:

        def named() -> Iterator[tuple[str, Callable[[], dict]]]:
            for name, each in ALL.items():
                if each.is_here and any(fnmatch(name, p) for p in arguments.models):
                    yield name, partial(one_model, pool, name, axes, arguments.scheme, float(arguments.timeout))

        code = campaign(arguments, "model", named(), described, 0.9, (torch, ndtp))
    sys.exit(code)


if __name__ == "__main__":
    main()
