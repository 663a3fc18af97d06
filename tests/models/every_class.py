"""Every model class of transformers on a grid against dense: outputs, gradients and greedily generated tokens.

    git clone --depth 1 --branch v5.16.0 https://github.com/huggingface/transformers
    python tests/models/every_class.py --tests transformers/tests [--grid x=2,y=2 --scheme 2d] [--classes "bert.*"]
        [--json bench/results/transformers_classes.json [--again [wrong broken ..]]]

Tiny configs and inputs come from transformers' own test classes, in fp32.  With --json what the file has of a grid is
kept, so that a run goes on where another stopped; --again compares anew, all or what has one of these verdicts.  Each
row names the commit of ndtp that gave it.  A class is

    equal    within 1e-4 of the dense result, relative to the largest number of the tensor,
    drift    no more than ten times as far off as dense itself is with its weights off by their last bit, where the
             model does not run in fp64; else a run in fp64, on the grid as well, decides,
    wrong    further off, or it generates other tokens, or gives something that the dense model does not give,
    refused  by ndtp's own error in `parallelize`,
    broken   whatever else it raises, or a timeout, which is of an idle machine: on a busy one it is as much longer,
             as the dense model took longer than its processor time,
    no dense where transformers' own test class does not run here.
"""

from __future__ import annotations

import argparse
import copy
import os
import pickle
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # of `products`

import tiny_models
import torch
import transformers
import transformers.modeling_layers
import transformers.modeling_utils  # so that ranks are forked with it
import transformers.utils.output_capturing
from against_dense import InDouble
from architectures import as_dense
from products import mesh_of
from recorded import CLOSE, axes_of, campaign, compared, decided, parser_of, using, whole
from torch import Tensor

import ndtp
import ndtp.testing

NEW_TOKENS = 8


def seed() -> None:
    transformers.set_seed(0)  # that of NumPy, too, by which some draw


def scalar(out: Any) -> Tensor:
    """The loss; of a model that computes none, a sum of all that it gives with fixed random factors."""
    loss = out.get("loss") if hasattr(out, "get") else None
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return loss.sum()
    generator, total = torch.Generator().manual_seed(0), torch.zeros(())
    for _, x in tiny_models.tensors_in(out):
        if x.requires_grad:
            total = total + (whole(x) * torch.randn(x.shape, generator=generator)).sum()
    return total


def results(model: Any, cases: dict[str, dict], go_on: dict | None, named: dict[str, Tensor] | None = None) -> dict:
    """Outputs in evaluation and in training, gradients, tokens: whole tensors by name; a collective on a grid.

    Args:
        named: the dense gradients, whose sizes those of padded parameters are cut to.
    """
    found: dict[str, Any] = {}
    for case, given in cases.items():
        model.eval()
        seed()
        with torch.no_grad():
            out = model(**copy.deepcopy(given))
        found |= {f"{case} eval {name}": whole(x).detach() for name, x in tiny_models.tensors_in(out)}
        model.train()
        model.zero_grad()
        seed()
        out = model(**copy.deepcopy(given))
        loss = scalar(out)
        if loss.requires_grad:
            loss.backward()
        found |= {f"{case} train {name}": whole(x).detach() for name, x in tiny_models.tensors_in(out)}
        for name, parameter in model.named_parameters():
            gradient = parameter.grad
            gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            key = f"{case} gradient of {name}"
            like = (named or {}).get(key)
            if gradient is not None:
                found[key] = gradient.detach().clone() if like is None else as_dense(gradient, like)
    if go_on is not None:
        model.eval()
        options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "num_beams": 1}
        options |= {"use_cache": True, "output_scores": True, "return_dict_in_generate": True}
        seed()
        out = model.generate(**copy.deepcopy(go_on), **options)
        found["tokens"] = out.sequences
        found["scores"] = torch.stack([whole(x) for x in out.scores])
    return found


def in_dtype(x: Any, dtype: torch.dtype) -> Any:
    """What a model is called with, in a dtype."""
    if isinstance(x, dict):
        return {name: in_dtype(value, dtype) for name, value in x.items()}
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def computing_in(dtype: torch.dtype) -> ExitStack:
    """All in a dtype, also what code computes in fp32 whatever the dtype of its model."""
    with ExitStack() as stack:
        stack.enter_context(using(dtype))
        if dtype is torch.float64:
            stack.enter_context(InDouble())
        return stack.pop_all()


def nearby(model: Any, cases: dict[str, dict]) -> list[dict]:
    """What dense gives with its weights off by their last bit."""
    moved = copy.deepcopy(model)
    seed()
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.mul_(1.0 + torch.randn_like(parameter) * torch.finfo(parameter.dtype).eps)
    return [results(moved, cases, None)]


def compare(mine: dict, dense: dict, also: list[dict]) -> dict:
    """The verdict and the tensors that are furthest off, of outputs and of gradients."""
    numbers = [{k: x for k, x in each.items() if k not in ("tokens", "scores")} for each in (mine, dense)]
    verdict, worst, off = compared(*numbers, also)
    row: dict[str, Any] = {"verdict": verdict, **off, "tokens": None, "worst": worst}
    if "tokens" in dense:
        row["tokens"] = bool(torch.equal(mine["tokens"], dense["tokens"]))
        if not row["tokens"] and not _is_a_tie(mine, dense):
            row |= {"verdict": "wrong", "worst": worst if verdict == "wrong" else "other tokens"}
    return row


def _is_a_tie(mine: dict, dense: dict) -> bool:
    """Whether the first token that differs had scores that are as far apart as rounding is."""
    steps = min(mine["scores"].shape[0], dense["scores"].shape[0])
    for a, b in zip(mine["scores"][:steps], dense["scores"][:steps], strict=True):
        rows = (a.argmax(-1) != b.argmax(-1)).nonzero().flatten()
        if len(rows):
            best = b[rows].topk(2).values
            return bool((best[:, 0] - best[:, 1] <= CLOSE * best.abs().max()).all())
    return False


def as_constructed(model: Any) -> None:
    """What transformers notes when it makes a model, which one that was read from a file lacks in this process."""
    noted = getattr(transformers.utils.output_capturing, "_CAN_RECORD_REGISTRY", None)
    for module in model.modules():
        if noted is not None and hasattr(module, "_can_record_outputs"):
            noted[module] = module._can_record_outputs


def anew(tests: Path, folder: str, name: str, weights: dict[str, Tensor]) -> Any:
    """The model of a class, made in this process."""
    case, kind = next(x for x in tiny_models.testers(tests, folder) if x[1].__name__ == name)
    model, _ = tiny_models.made(case, kind)
    model.load_state_dict(weights)
    return model


def put(path: str, model: Any, case: Any, **rest: Any) -> None:
    """Write what ranks need; a model that cannot be pickled (hooks, parametrizations) is made there anew."""
    try:
        torch.save({"model": model, **rest}, path)
    except (AttributeError, RuntimeError, TypeError, pickle.PicklingError):
        tests, folder = Path(sys.modules[case.__module__].__file__).parents[2], case.__module__.split(".")[-2]
        where = (tests, folder, type(model).__name__)
        torch.save({"where": where, "weights": model.state_dict(), **rest}, path)


def on_grid(path: str, axes: dict[str, int], scheme: str, dtype: torch.dtype = torch.float32) -> dict:
    """One class on every rank: what `compare` says, and what the report does."""
    given = torch.load(path, weights_only=False)
    model = given["model"] if "model" in given else anew(*given["where"], given["weights"])
    as_constructed(model)
    row: dict[str, Any] = {"split": 0.0}
    with warnings.catch_warnings(), computing_in(dtype):
        warnings.simplefilter("ignore")
        try:
            ndtp.parallelize(model.to(dtype), mesh_of(ndtp.Grid(axes)), scheme=scheme)
        except (ValueError, NotImplementedError) as error:
            if not type(error).__module__.startswith("ndtp"):
                raise
            return row | {"verdict": "refused", "error": str(error)}
        report = model.ndtp_report
        mine = results(model, given["cases"], given["prompt"], given["dense"])
        total, split, _ = report.parameters  # of a model that waits for its first call: since then
        row |= {"split": round(split / max(total, 1), 3), "kept": dict(report.kept)}
        return row | compare(mine, given["dense"], given["also"]) | {"gathered": dict(report.gathered)}


def merged(rows: list[dict]) -> dict:
    """Of all ranks: the worst."""
    order = ["equal", "drift", "refused", "wrong"]
    return max(rows, key=lambda row: order.index(row["verdict"]))


class Alarm:
    """The dense model has its time, too."""

    def __init__(self, seconds: int) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        signal.signal(signal.SIGALRM, self._ring)
        signal.alarm(self.seconds)

    def __exit__(self, *_: object) -> None:
        signal.alarm(0)

    def _ring(self, *_: object) -> None:
        raise TimeoutError(f"{self.seconds} s were not enough")


def one_class(case: Any, kind: type, axes: dict[str, int], scheme: str, timeout: int, path: str) -> dict:
    began, used = time.monotonic(), time.process_time()
    try:
        with warnings.catch_warnings(), Alarm(4 * timeout):
            warnings.simplefilter("ignore")
            model, cases = tiny_models.made(case, kind)
            go_on = tiny_models.prompt(model, case, cases)
            try:
                dense = results(copy.deepcopy(model), cases, go_on)
            except TimeoutError:
                raise
            except Exception:  # what the testers give does not do for all of it
                go_on, cases = None, {"own": cases["own"]}
                dense = results(copy.deepcopy(model), cases, None)
    except Exception as error:
        return {"verdict": "no dense", "error": f"{type(error).__name__}: {error}"[:300]}
    timeout = round(timeout * max((time.monotonic() - began) / (time.process_time() - used + 0.1), 1.0))

    def asked(dtype: torch.dtype, moved: bool) -> dict:
        given, prompt = in_dtype(cases, dtype), in_dtype(go_on, dtype)
        try:
            with warnings.catch_warnings(), Alarm(4 * timeout), computing_in(dtype):
                warnings.simplefilter("ignore")
                bare = copy.deepcopy(model).to(dtype)
                theirs = dense if dtype is torch.float32 else results(copy.deepcopy(bare), given, prompt)
                also = nearby(bare, given) if moved else []
        except Exception as error:
            return {"verdict": "no dense", "error": f"{type(error).__name__}: {error}"[:300]}
        put(path, model, case, cases=given, prompt=prompt, dense=theirs, also=also)
        return merged(ndtp.testing.run(on_grid, _ranks(axes), args=(path, axes, scheme, dtype), timeout=float(timeout)))

    return decided(asked)


def _ranks(axes: dict[str, int]) -> int:
    ranks = 1
    for size in axes.values():
        ranks *= size
    return ranks


def described(name: str, row: dict) -> str:
    tokens = {True: "same", False: "OTHER", None: "-"}[row.get("tokens")]
    numbers = f"{row.get('forward', float('nan')):9.2g} {row.get('backward', float('nan')):9.2g}"
    why = (row.get("error") or row.get("worst") or "").partition("\n")[0][:160]
    return f"{name:58} {row['verdict']:8} {row.get('split', 0.0):6.1%} {numbers} {tokens:>6}  {why}".rstrip()


def found(arguments: argparse.Namespace) -> Iterator[tuple[str, Any, type]]:
    patterns = arguments.classes
    folders = sorted(path.name for path in (arguments.tests / "models").iterdir() if path.is_dir())
    for model in folders:
        if not any(fnmatch(model, p.partition(".")[0] or "*") for p in patterns):
            continue
        for case, kind in tiny_models.testers(arguments.tests, model):
            if any(fnmatch(f"{model}.{kind.__name__}", p if "." in p else p + ".*") for p in patterns):
                yield f"{model}.{kind.__name__}", case, kind


def main() -> None:
    parser = parser_of(__doc__, "2d", 120)
    parser.add_argument("--tests", type=Path, required=True, help="the folder `tests` of a checkout of transformers")
    parser.add_argument("--classes", nargs="*", default=["*"], help='patterns of FOLDER.Class, "bert.*ForMaskedLM"')
    parser.add_argument("--part", default="1/1", help="which part of all classes, 2/3, where several runs share them")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    arguments.tests = tiny_models.tests_at(arguments.tests)
    part, parts = map(int, arguments.part.split("/"))
    path = os.path.join(tempfile.mkdtemp(prefix="ndtp-class-"), "given")
    rest = (axes_of(arguments.grid), arguments.scheme, arguments.timeout, path)

    def named() -> Iterator[tuple[str, Callable[[], dict]]]:
        for i, (name, case, kind) in enumerate(found(arguments)):
            if i % parts == part - 1:
                yield name, partial(one_class, case, kind, *rest)

    sys.exit(campaign(arguments, "class", named(), described, 0.95, (torch, transformers, ndtp)))


if __name__ == "__main__":
    main()
