"""Every model class of transformers on a grid against dense: outputs, gradients and greedily generated tokens.

    git clone --depth 1 --branch v5.16.0 https://github.com/huggingface/transformers
    python tests/models/every_class.py --tests transformers/tests [--grid x=2,y=2 --scheme 2d] [--classes "bert.*"]
        [--json bench/results/transformers_classes.json [--again [wrong broken ..]]]

Tiny configs and inputs come from transformers' own test classes, in fp32.  With --json what the file has of a grid is
kept, so that a run goes on where another stopped; --again compares anew, all or what has one of these verdicts.  Each
row names the commit of ndtp that gave it.  A class is

    equal    within 1e-4 of the dense result, relative to the largest number of the tensor,
    drift    further off, but no more than ten times as far from the fp64 result as the dense fp32 model is,
    wrong    further off, or it generates other tokens,
    refused  by ndtp's own error in `parallelize`,
    broken   whatever else it raises, or a timeout, which is of an idle machine: on a busy one it is as much longer,
             as the dense model took longer than its processor time,
    no dense where transformers' own test class does not run here.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from datetime import date
from fnmatch import fnmatch
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
from recorded import CLOSE, DRIFT, GOOD, commit_of, said_by, whole
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


def in_double(model: Any, cases: dict) -> dict:
    """The results in fp64; where a class has no such form, in fp32 with its weights off by their last bit."""
    exact = copy.deepcopy(model)
    wide = lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x  # noqa: E731
    try:
        with InDouble():
            return results(exact.double(), {c: {k: wide(v) for k, v in g.items()} for c, g in cases.items()}, None)
    except Exception:
        exact = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in exact.parameters():
                parameter.mul_(1.0 + torch.randn_like(parameter) * 2.0**-23)
        return results(exact, cases, None)


def compare(mine: dict, dense: dict, exact: dict) -> dict:
    """The verdict and the tensors that are furthest off, of outputs and of gradients."""
    row: dict[str, Any] = {"verdict": "equal", "forward": 0.0, "backward": 0.0, "tokens": None, "worst": ""}
    largest = max((float(x.abs().max()) for key, x in dense.items() if " gradient " in key and x.numel()), default=0.0)
    for name, theirs in dense.items():
        if name in ("tokens", "scores"):
            continue
        kind = "backward" if " gradient " in name else "forward"
        x = mine.get(name)
        if x is None or x.shape != theirs.shape:
            return row | {"verdict": "wrong", "worst": f"{name}: {None if x is None else tuple(x.shape)}"}
        truth = exact[name] if name in exact and exact[name].shape == theirs.shape else theirs
        differs = ~((x == theirs) | (x.isnan() & theirs.isnan()))
        overflows = truth.isfinite() | (x.abs() > torch.finfo(torch.float32).max / 1e3)
        differs &= ~(x.isfinite() & overflows & ~theirs.isfinite())  # where the dense sum alone overflows
        if not differs.any():
            continue
        scale = float(theirs[theirs.isfinite()].abs().max()) if theirs.isfinite().any() else 0.0
        scale = max(scale, largest * 1e-2 if kind == "backward" else 0.0, 1e-30)
        off = float((x.double() - theirs.double()).abs()[differs].max()) / scale
        error, allowed = (float((y.double() - truth.double()).abs()[differs].max()) for y in (x, theirs))
        off = off if off == off else float("inf")
        if off > row[kind]:
            row[kind] = off
        if off <= CLOSE:
            continue
        is_drift = error <= DRIFT * allowed
        if not is_drift or row["verdict"] == "equal":
            row |= {"verdict": "drift" if is_drift else "wrong", "worst": f"{name}: {off:.2g}"}
        if not is_drift:
            break
    if "tokens" in dense:
        row["tokens"] = bool(torch.equal(mine["tokens"], dense["tokens"]))
        if not row["tokens"] and not _is_a_tie(mine, dense):
            row |= {"verdict": "wrong", "worst": row["worst"] or "other tokens"}
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


def on_grid(path: str, axes: dict[str, int], scheme: str) -> dict:
    """One class on every rank: what `compare` says, and what the report does."""
    given = torch.load(path, weights_only=False)
    model = given["model"] if "model" in given else anew(*given["where"], given["weights"])
    as_constructed(model)
    row: dict[str, Any] = {"split": 0.0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ndtp.parallelize(model, mesh_of(ndtp.Grid(axes)), scheme=scheme)
        except (ValueError, NotImplementedError) as error:
            if not type(error).__module__.startswith("ndtp"):
                raise
            return row | {"verdict": "refused", "error": str(error)}
        report = model.ndtp_report
        mine = results(model, given["cases"], given["prompt"], given["dense"])
        total, split, _ = report.parameters  # of a model that waits for its first call: since then
        row |= {"split": round(split / max(total, 1), 3), "kept": dict(report.kept)}
        return row | compare(mine, given["dense"], given["exact"]) | {"gathered": dict(report.gathered)}


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
                go_on = None
                dense = results(copy.deepcopy(model), {"own": cases["own"]}, None)
                cases = {"own": cases["own"]}
            rest = {"cases": cases, "prompt": go_on, "dense": dense}
            put(path, model, case, exact={}, **rest)
    except Exception as error:
        return {"verdict": "no dense", "error": f"{type(error).__name__}: {error}"[:300]}
    timeout = round(timeout * max((time.monotonic() - began) / (time.process_time() - used + 0.1), 1.0))
    row = on_ranks(axes, scheme, timeout, path)
    if row["verdict"] != "wrong":
        return row
    with warnings.catch_warnings(), Alarm(timeout):  # is dense code in fp32 as far from fp64 as that?
        warnings.simplefilter("ignore")
        put(path, model, case, exact=in_double(model, cases), **rest)
    return on_ranks(axes, scheme, timeout, path)


def on_ranks(axes: dict[str, int], scheme: str, timeout: int, path: str) -> dict:
    ranks = 1
    for size in axes.values():
        ranks *= size
    try:
        return merged(ndtp.testing.run(on_grid, ranks, args=(path, axes, scheme), timeout=float(timeout)))
    except (ndtp.testing.RankError, ndtp.testing.RankTimeout) as error:
        return {"verdict": "broken", "error": said_by(error), "trace": str(error)}


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path, required=True, help="the folder `tests` of a checkout of transformers")
    parser.add_argument("--grid", default="x=2,y=2", help="axes and their sizes")
    parser.add_argument("--scheme", default="2d")
    parser.add_argument("--classes", nargs="*", default=["*"], help='patterns of FOLDER.Class, "bert.*ForMaskedLM"')
    parser.add_argument("--part", default="1/1", help="which part of all classes, 2/3, where several runs share them")
    parser.add_argument("--timeout", type=int, default=120, help="seconds for a class")
    parser.add_argument("--json", type=Path, help="the record, which is gone on with")
    parser.add_argument("--again", nargs="*", help="compare what the record has, too: all, or of these verdicts")
    parser.add_argument("--trace", action="store_true", help="print what a broken class raised")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    axes = {name: int(size) for name, size in (each.split("=") for each in arguments.grid.split(","))}
    arguments.tests = tiny_models.tests_at(arguments.tests)
    on = f"{arguments.grid} {arguments.scheme}"
    rows: dict[str, dict] = {}
    if arguments.json is not None and arguments.json.exists():
        rows = {row["class"] + " on " + row["on"]: row for row in json.loads(arguments.json.read_text())["rows"]}
    part, parts = map(int, arguments.part.split("/"))
    commit = commit_of(Path(ndtp.__file__).parent)
    path = os.path.join(tempfile.mkdtemp(prefix="ndtp-class-"), "given")
    verdicts: Counter[str] = Counter()
    for i, (name, case, kind) in enumerate(found(arguments)):
        known = rows.get(f"{name} on {on}")
        is_wanted = known is None or arguments.again == [] or known["verdict"] in (arguments.again or ())
        if i % parts != part - 1 or not is_wanted:
            continue
        start = time.monotonic()
        try:
            row = one_class(case, kind, axes, arguments.scheme, arguments.timeout, path)
        except Exception:
            row = {"verdict": "broken", "error": traceback.format_exc().splitlines()[-1]}
        trace = row.pop("trace", "")
        row = {"class": name, "on": on, "commit": commit, **row, "seconds": round(time.monotonic() - start, 1)}
        rows[f"{name} on {on}"] = row
        verdicts[row["verdict"]] += 1
        print(described(name, row), flush=True)
        if trace and arguments.trace:
            print(trace, file=sys.stderr, flush=True)
        if arguments.json is not None:
            write(arguments.json, rows)
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items())))
    sys.exit(1 if verdicts["wrong"] or verdicts["broken"] else 0)


def write(path: Path, rows: dict[str, dict]) -> None:
    """All rows, one a line, and how many of each grid have which verdict."""
    versions = {module.__name__: module.__version__ for module in (torch, transformers, ndtp)}
    counts: dict[str, dict[str, int]] = {}
    for row in rows.values():
        each = counts.setdefault(row["on"], {})
        each[row["verdict"]] = each.get(row["verdict"], 0) + 1
        if row["verdict"] in GOOD and row["split"] >= 0.95:
            each["split to 95 %"] = each.get("split to 95 %", 0) + 1
    about = {"date": str(date.today()), "versions": versions, "counts": counts}
    text = ",\n  ".join(json.dumps(rows[key]) for key in sorted(rows))
    path.write_text(json.dumps(about, indent=1)[:-2] + f',\n "rows": [\n  {text}\n ]\n}}\n')


if __name__ == "__main__":
    main()
