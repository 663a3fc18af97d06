"""Run a `Language` program on the ranks, beside the dense model: what is refused on the grid is left out there."""

from __future__ import annotations

import copy
import pickle

import torch
from language import Language
from language_deeds import DEEDS, Side, Split
from language_loop import Wrong, name_the_odd
from torch import Tensor

import ndtp
from ndtp.errors import MismatchError

TOLERANCE = {"own": 1e-8, "llama": 2e-5}  # of the largest magnitude: norms of transformers compute in fp32
DIVERGED = 1e4  # weights begin below one: rounding of a model that has grown so is not told from an error


def run_language(program: Language) -> int:
    """How many results were compared.

    Raises:
        Wrong: something else than dense; or an odd rank that is not named, or a rank that names what is not odd.
    """
    dense = Side(program)
    try:
        ours = Split(program)
    except Exception as error:
        if _is_refusal(error):
            return 0
        raise
    compared = 0
    for index, name in enumerate(program.deeds):
        compared += _do(name, f"{index} {name}", dense, ours)
    if program.odd:
        name_the_odd(ours)
        compared += 1
    ours.mesh.discard_gradients()
    return compared


def _do(name: str, label: str, dense: Side, ours: Split) -> int:
    """A deed on both sides; one that is refused on the grid changes nothing there and is not done on dense."""
    draws = dense.draws
    before = copy.deepcopy(dense.model) if name == "pickle" else None
    try:
        if before is not None:
            DEEDS[name](dense)  # a class that cannot be pickled is no matter of grids
            dense.draws = draws
    except Exception:
        return 0
    try:
        mine = DEEDS[name](ours)
    except MismatchError:
        raise
    except Exception as error:
        if not _is_refusal(error):
            raise
        ours.draws = draws
        ours.model.zero_grad()
        mine, name = None, ""
    theirs = DEEDS[name](dense) if name else None
    ours.look()
    values = {f"value of {key}": ours.whole(p) for key, p in ours.by_name().items()}
    expected = {f"value of {key}": dense.whole(p) for key, p in dense.by_name().items()}
    pairs = [(label, mine, theirs)] if isinstance(theirs, Tensor) else []
    if isinstance(theirs, dict):
        if list(mine) != list(theirs):
            raise Wrong(f"{label}: {sorted(set(mine) ^ set(theirs))} are on one side only")
        pairs = [(f"{label} {key}", mine[key], theirs[key]) for key in theirs]
    pairs += [(f"{label} {key}", values[key], expected[key]) for key in expected]
    pairs += [(f"{label} seen by a hook", x, y) for x, y in zip(ours.seen, dense.seen, strict=True)]
    if not all(bool((x.abs() <= DIVERGED).all()) for x in expected.values()):
        return 0
    wrong = [text for text in (_difference(*pair, TOLERANCE[dense.program.family]) for pair in pairs) if text]
    if wrong:
        raise Wrong("; ".join(wrong[:4]))
    return len(pairs)


def _is_refusal(error: Exception) -> bool:
    """In ndtp's own words, with what to do instead; pickle tells of classes that are made in a run in its own."""
    if isinstance(error, pickle.PicklingError):
        return True
    return isinstance(error, ndtp.LayoutError) or "fix:" in str(error) or "ndtp" in str(error)


def _difference(label: str, mine: Tensor, theirs: Tensor, tolerance: float) -> str:
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return f"{label}: {mine.dtype} {tuple(mine.shape)} instead of {theirs.dtype} {tuple(theirs.shape)}"
    if not theirs.is_floating_point():
        return "" if torch.equal(mine, theirs) else f"{label}: other tokens"
    scale = max(theirs.abs().max().item(), 1e-6) if theirs.numel() else 1.0
    off = (mine - theirs).abs().max().item() if theirs.numel() else 0.0
    return "" if off <= tolerance * scale else f"{label}: off by {off:.3g} of {scale:.3g}"
