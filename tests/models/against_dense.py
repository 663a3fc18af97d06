"""A stock model in fp32 on a grid against the dense one: how far each is from the result in fp64, and what else."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import architectures
import torch
from products import mesh_of
from torch.overrides import TorchFunctionMode

import ndtp
from ndtp import CommMeter, Grid
from ndtp.models.hidden import Hidden, leave, whole

# Grids of eight ranks by name: axes, scheme.
GRIDS = {
    "1D": ({"x": 8}, "1d"),
    "1D sequence parallel": ({"x": 8}, "1d-sp"),
    "2D rows": ({"x": 2, "y": 4}, "2d"),
    "2D features": ({"x": 2, "y": 4}, "2d-features"),
    "3D 2x2x2": ({"z": 2, "x": 2, "y": 2}, "3d"),
    "3D z=4 y=2": ({"z": 4, "x": 1, "y": 2}, "3d"),
    "2D with dp=2": ({"dp": 2, "x": 2, "y": 2}, "2d"),
}
# The same of two and four ranks, for tests.
SMALL_GRIDS = {
    "1D": ({"x": 2}, "1d"),
    "1D sequence parallel": ({"x": 2}, "1d-sp"),
    "2D rows": ({"x": 2, "y": 2}, "2d"),
    "2D features": ({"x": 2, "y": 2}, "2d-features"),
    "3D z=2 x=2": ({"z": 2, "x": 2, "y": 1}, "3d"),
    "3D z=2 y=2": ({"z": 2, "x": 1, "y": 2}, "3d"),
    "2D with dp=2": ({"dp": 2, "x": 1, "y": 2}, "2d"),
}
FACTOR = 4.0  # as `ndtp.testing.assert_close_to_dense`: times the error of the dense fp32 result,
FLOOR_EPS = 4.0  # or times eps of the largest magnitude
# Of a test: one layer, where all layers of a model are alike; a prompt, and two steps with what the cache has of it.
ONE_LAYER = {"num_hidden_layers": 1, "n_layer": 1, "num_layers": 1}
# With and without a window; the first with a bias that the others share.
OF_SEVERAL_KINDS = ("Gemma2ForCausalLM", "T5ForConditionalGeneration")
SMALL_NEW_TOKENS = 3
CLOSE = 1e-5  # what transformers asks of its own tensor parallelism, relative and absolute
BATCH, LENGTH, NEW_TOKENS = 8, 6, 5


class InDouble(TorchFunctionMode):
    """What a model computes in fp32 whatever its dtype, as many norms and softmaxes do, in fp64 too."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        change = lambda x: torch.float64 if x is torch.float32 else x  # noqa: E731
        kwargs = {name: change(value) for name, value in (kwargs or {}).items()}
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*map(change, args), **kwargs)


@dataclass
class Step:
    """What a training step gives, whole: tensors by name."""

    logits: torch.Tensor
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]

    def named(self):
        yield "logits", self.logits
        yield "loss", self.loss
        for name, gradient in self.gradients.items():
            yield f"gradient of {name}", gradient


def step(model, given) -> Step:
    model.zero_grad()
    out = model(**given)
    out.loss.backward()
    return Step(out.logits, out.loss.detach(), {name: p.grad for name, p in model.named_parameters()})


def read(step: Step) -> Step:
    """With logits computed, where the loss did without."""
    return Step(step.logits.detach(), step.loss, step.gradients)


def gathered(step: Step, like: Step) -> Step:
    """What is split, whole; a collective.  Padding is left out."""
    gradients = {}
    for (name, mine), theirs in zip(step.gradients.items(), like.gradients.values(), strict=True):
        mine = mine.full_tensor() if hasattr(mine, "full_tensor") else mine
        gradients[name] = mine if mine is None or theirs is None else architectures.as_dense(mine, theirs)
    return Step(whole(step.logits), step.loss, gradients)


def is_repeated(one: Step, other: Step) -> bool:
    """Bit for bit, on this rank's shards."""
    local = lambda x: leave(x) if isinstance(x, Hidden) else getattr(x, "_local_tensor", x)  # noqa: E731
    pairs = zip(one.named(), other.named(), strict=True)
    return all(x is y is None or torch.equal(local(x), local(y)) for (_, x), (_, y) in pairs)


def distances(found: Step, dense: Step, exact: Step) -> dict[str, dict]:
    """For each kind of result the tensor that is worst.

    `factor` is the error against fp64 in units of what the dense fp32 model is off, or of eps of the largest magnitude
    where that is more; `close` whether it is within CLOSE of the dense result, relative and absolute.
    """
    worst: dict[str, dict] = {}
    for (name, mine), (_, theirs), (_, truth) in zip(found.named(), dense.named(), exact.named(), strict=True):
        kind = name.split(" ")[0]
        row = worst.setdefault(kind, {"factor": 0.0, "close": True})
        if theirs is None:
            if mine is not None:
                raise AssertionError(f"{name}: the dense model has none")
            continue
        if mine is None or mine.shape != theirs.shape:
            raise AssertionError(f"{name}: {None if mine is None else tuple(mine.shape)}, not {tuple(theirs.shape)}")
        error, off = ((x.double() - truth).abs().max().item() for x in (mine, theirs))
        eps = torch.finfo(torch.float32).eps * truth.abs().max().item()
        # In units such that FACTOR is the limit for both: FACTOR times the error of dense, FLOOR_EPS times eps.
        factor = error / max(off, eps * FLOOR_EPS / FACTOR, 1e-30)
        row["close"] &= bool(torch.allclose(mine, theirs, rtol=CLOSE, atol=CLOSE))
        if not factor <= row["factor"]:  # also where it is NaN
            row.update(factor=factor, worst=name, error=error, dense_error=off, magnitude=truth.abs().max().item())
    return worst


def generated(model, given, mask, small: bool) -> torch.Tensor:
    count = SMALL_NEW_TOKENS if small else NEW_TOKENS
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "use_cache": True}
    return model.generate(given["input_ids"], attention_mask=mask, **options)


def masked(given):
    """Two sequences of the batch end early; their targets count no more."""
    mask = torch.ones_like(given["input_ids"])
    mask[0, 4:], mask[-1, 5:] = 0, 0
    return given | {"attention_mask": mask, "labels": given["labels"].masked_fill(mask == 0, -100)}


def build(name: str, small: bool):
    layers = ONE_LAYER if small and name not in OF_SEVERAL_KINDS else {}
    return architectures.build(name, **architectures.WIDE_OF.get(name, architectures.WIDE), **layers).float()


def inputs_of(name: str, small: bool) -> dict[str, dict]:
    """By case: the batch as it is, and one that is masked, where there are tokens to mask; the last alone if small."""
    given = {
        key: x.float() if x.is_floating_point() else x for key, x in architectures.inputs(name, BATCH, LENGTH).items()
    }
    cases = {"plain": given} | ({"masked": masked(given)} if "input_ids" in given else {})
    return dict(list(cases.items())[-1:]) if small else cases


def reference(name: str, small: bool = False) -> dict:
    """What the dense model gives, in fp32 and in fp64, and the tokens that it generates."""
    dense, exact = build(name, small), build(name, small).double()
    found: dict = {"tokens": None}
    for case, given in inputs_of(name, small).items():
        with InDouble():
            truth = step(exact, {key: x.double() if x.is_floating_point() else x for key, x in given.items()})
        found[case] = (gathered(read(step(dense, given)), truth), gathered(read(truth), truth))
        if case == "masked" and dense.can_generate():
            found["tokens"] = generated(dense, given, given["attention_mask"].flip(1), small)
    return found


def compare(name: str, sizes: dict[str, int], scheme: str, dense: dict, small: bool = False) -> dict:
    """All that is asked of one model on one grid; runs on every rank.  Failures are in the row, under "failed".

    Args:
        dense: what `reference` found.
        small: as a test compares them.
    """
    mesh = mesh_of(Grid(sizes))
    model, cases = build(name, small), inputs_of(name, small)
    count = BATCH // mesh.grid.size([axis for axis in mesh.grid if axis == "dp"])
    rows = slice(mesh.coordinate.get("dp", 0) * count, (mesh.coordinate.get("dp", 0) + 1) * count)
    result: dict = {"architecture": name, "grid": str(mesh.grid), "scheme": scheme}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of what is gathered: it is in the row
        ndtp.parallelize(model, mesh, scheme=scheme)
        for case, given in cases.items():
            mine = {key: value[rows] for key, value in given.items()}
            found = step(model, mine)
            gathered_by = dict(model.ndtp_report.gathered)  # by a step alone, not by what is compared here
            found = read(found)
            with CommMeter() as meter:  # the first may fetch what the model before it on this mesh would have used next
                again = step(model, mine)
            again = read(again)
            result[case] = distances(gathered(found, dense[case][0]), *(_rows(each, rows) for each in dense[case]))
            result[case]["repeats"] = is_repeated(found, again)
            if "bytes" not in result:
                measured = predicted = meter.volume.total
                if not small or mesh.rank == 0:  # what is predicted is the same for all: a test compares them
                    predicted = model.ndtp_report.volume(*next(iter(mine.values())).shape[:2]).total
                result["bytes"] = {"measured": measured, "predicted": predicted}
                result["gathered"] = gathered_by
        if dense["tokens"] is not None:
            tokens = generated(model, mine, mine["attention_mask"].flip(1), small)  # prompts are padded on the left
            result["generation"] = bool(torch.equal(tokens, dense["tokens"][rows]))
    total, split, held = model.ndtp_report.parameters
    result |= {"split": split / total, "held": held / total}
    result["failed"] = failures(result, list(cases))
    if "input_ids" in given and not isinstance(found.logits, Hidden):
        result["failed"].append("logits are whole")
    return result


def _rows(step: Step, rows: slice) -> Step:
    return Step(step.logits[rows], step.loss, step.gradients)


def failures(row: dict, cases: list[str]) -> list[str]:
    found = []
    for case in cases:
        for kind in ("logits", "loss", "gradient"):
            each = row[case][kind]
            if not each["factor"] <= FACTOR:
                found.append(f"{case}: {each['worst']} {each['factor']:.3g} times the dense error")
            if not each["close"]:
                found.append(f"{case}: a {kind} is not within {CLOSE:g} of the dense one")
        if not row[case]["repeats"]:
            found.append(f"{case}: a repeat differs")
    if row["bytes"]["measured"] != row["bytes"]["predicted"]:
        found.append(f"a step takes {row['bytes']['measured']} bytes, not {row['bytes']['predicted']}")
    if row.get("generation") is False:
        found.append("other tokens are generated")
    return found


def compare_from(path: str, name: str, grid: str, small: bool = False) -> dict:
    """With the reference in a file: it is computed once, not on every rank.  That of a `small` grid is small, too."""
    axes, scheme = (SMALL_GRIDS if small else GRIDS)[grid]
    return compare(name, axes, scheme, torch.load(path, weights_only=False), small) | {"on": grid}
