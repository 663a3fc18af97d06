"""The losses of a stock model where `dp` (or `e`) splits the batch: those of all ranks' rows, of which a rank knows its
own, and the router's load-balancing loss, which is no mean over tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from ndtp.algebra.layout import Layout
from ndtp.compute.torch_calls import Arguments, Keywords
from ndtp.errors import LayoutError, warn
from ndtp.models.frame import Frame
from ndtp.models.hidden import Hidden
from ndtp.models.loss_terms import Term, slopes, terms_of
from ndtp.ops.products import relayout
from ndtp.split.tensor import SplitTensor

IGNORED = -100
FIX = "the loss of out.logits by your own code, or dp=1"
MOST_TOLD = 64  # terms, of which ranks compare the counts


_IS_JUDGED_OUTSIDE = ContextVar("is_judged_outside", default=False)


@contextmanager
def judged_outside() -> Iterator[None]:
    """Leave each loss of a rank's rows as it is: what calls the model finds out itself how ranks' losses combine."""
    token = _IS_JUDGED_OUTSIDE.set(True)
    try:
        yield
    finally:
        _IS_JUDGED_OUTSIDE.reset(token)


@dataclass(frozen=True)
class DataLoss:
    """A forward hook.  Losses of logits that are split are those of all sequences already.

    Other terms are of the rows of one dp rank.  A mean counts as much as the numbers that it is a mean of; sums are
    added up; of anything else the mean over the ranks is taken.
    """

    frame: Frame
    name: str

    def __call__(self, model: nn.Module, args: Arguments, kwargs: Keywords, output: Any) -> Any:
        split, self.frame.split_losses = self.frame.split_losses, []
        named = dict(output) if isinstance(output, Mapping) else {}
        if isinstance(output, tuple):
            named = dict(zip(("loss", "logits"), output, strict=False))
        loss = named.get("loss")
        if not isinstance(loss, Tensor) or loss.dim() or (_IS_JUDGED_OUTSIDE.get() and not split):
            return output
        terms = terms_of(loss, split)
        if split and loss.requires_grad and not terms:
            return output
        labels = None if split else kwargs.get("labels")
        ignores = isinstance(labels, Tensor) and not labels.is_floating_point() and bool((labels == IGNORED).any())
        # What is of all sequences goes without the others: its gradient is this rank's part of a sum already.
        known = sum(slope * term for slope, term in zip(slopes(loss, split), split, strict=True))
        total = self._over_ranks(loss - known, terms, ignores) + known
        if isinstance(output, tuple):
            return (total, *output[1:])
        output["loss"] = total
        return output

    def _over_ranks(self, loss: Tensor, terms: Sequence[Term], ignores: bool) -> Tensor:
        """Return the loss of all ranks' rows, of which a rank has that of its own rows.

        Args:
            ignores: whether the rank has labels that do not count.

        Raises:
            LayoutError: the terms are means of numbers of which ranks have different shares, or it cannot be told.
        """
        mesh, axes = self.frame.mesh, self.frame.mesh.grid.nontrivial(self.frame.outside.dims[0])
        ranks, kinds = mesh.grid.size(axes), {term.kind for term in terms}
        every = self._told(terms, ignores, loss.device, axes)
        if not every.is_meta and not bool((every[:, 0] == every[0, 0]).all()):
            raise LayoutError(
                f"parallelize: the loss of {self.name} has other terms on some of {ranks} data-parallel ranks\n"
                f"  fix: rows of one kind on every rank, {FIX}"
            )
        counts = every[:, 2 : 2 + len(terms)]
        share: Any = 1 / ranks
        if kinds == {"sum"}:
            share = 1
        elif kinds == {"mean"} and len(terms) == 1:
            share = (counts / counts.sum(0))[mesh.grid.index(mesh.rank, axes), 0]
        elif not every.is_meta:
            share = self._checked(every, counts, terms)[mesh.grid.index(mesh.rank, axes)]
        if isinstance(share, Tensor):
            loss = torch.where(share == 0, 0, loss)  # the mean of no labels is NaN
        if "numbers" in kinds or (len(kinds) > 1 and "sum" in kinds):
            self._warn()
        bare = Layout(mesh.grid, None)
        part = (loss * share).to(loss.dtype).reshape(1)
        return relayout(part, bare, bare, mesh, "loss", partial=axes).reshape(())

    def _told(self, terms: Sequence[Term], ignores: bool, device: torch.device, axes: tuple[str, ...]) -> Tensor:
        """Return what each rank tells of its terms: how many of which kinds, ignored labels, and counts of means."""
        mesh, bare = self.frame.mesh, Layout(self.frame.mesh.grid, None)
        kinds = crc32(" ".join(term.kind or "-" for term in terms).encode())
        told = [kinds, ignores, *(0 if term.count is None else term.count for term in terms[:MOST_TOLD])]
        own = torch.stack([torch.as_tensor(each, dtype=torch.float64, device=device).reshape(()) for each in told])
        every = own.new_zeros(mesh.grid.size(axes), 2 + MOST_TOLD)
        every[mesh.grid.index(mesh.rank, axes), : len(own)] = own
        return relayout(every.flatten(), bare, bare, mesh, "loss", partial=axes).view(every.shape)

    def _checked(self, every: Tensor, counts: Tensor, terms: Sequence[Term]) -> Tensor:
        """Return each rank's share of a loss of several terms, or of one of which no numbers are known."""
        ranks, is_known = len(every), all(term.kind == "mean" for term in terms)
        means = counts[:, [i for i, term in enumerate(terms[:MOST_TOLD]) if term.kind == "mean"]]
        shares = means / means.sum(0)
        equal = torch.full_like(shares, 1 / ranks)
        wanted = shares[:, :1] if is_known and shares.numel() else equal
        if shares.numel() and not torch.allclose(shares, wanted.expand_as(shares), equal_nan=True):
            numbers = ", ".join(f"{each:g}" for each in means.flatten().tolist())
            raise LayoutError(
                f"parallelize: the loss of {self.name} has {len(terms)} terms, among them means of other numbers of "
                f"labels on each of {ranks} data-parallel ranks: {numbers}\n"
                f"  fix: rows with as many labels on each rank, {FIX}"
            )
        if not shares.numel() and bool(every[:, 1].any()):
            raise LayoutError(
                f"parallelize: the loss of whole logits is a mean over labels, of which dp ranks may ignore "
                f"({IGNORED}) different numbers\n  fix: {FIX}"
            )
        return wanted[:, 0] if wanted.numel() else every.new_full((ranks,), 1 / ranks)

    def _warn(self) -> None:
        warn(
            f"ndtp: the loss of {self.name} has a sum of which it is not known what it is divided by; the loss is "
            "averaged over the data-parallel ranks, as if it were a mean over rows"
        )


FORMULA = "load_balancing_loss_func"  # transformers', beside each model that has one
COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")


@dataclass(frozen=True)
class RouterLoss:
    """A forward hook.  The loss is no mean over tokens: a rank cannot take it of its own sequences.

    The model's formula is computed anew, from all ranks' logits: one number a token and expert.
    """

    frame: Frame

    def __call__(self, model: nn.Module, args: Arguments, kwargs: Keywords, output: Any) -> Any:
        formula = getattr(sys.modules[type(model).__module__], FORMULA, None)
        logits = output.get("router_logits") if isinstance(output, Mapping) else None
        before = output.get("aux_loss") if isinstance(output, Mapping) else None
        sizes = [getattr(model, name, None) for name in ("num_experts", "num_experts_per_tok")]
        if formula is None or not isinstance(before, Tensor) or not logits or None in sizes:
            return output  # what is left of it is averaged, see `DataLoss`
        mesh, outside = self.frame.mesh, self.frame.outside
        bare, mask = Layout(mesh.grid, None, None), kwargs.get("attention_mask")
        rows = [each.gathered() if isinstance(each, (Hidden, SplitTensor)) else each for each in logits]
        every = tuple(relayout(each, outside, bare, mesh, "router logits") for each in rows)
        if isinstance(mask, Tensor):
            mask = relayout(mask.to(every[0].dtype), outside, bare, mesh, "attention mask")
        loss = formula(every, *sizes, mask)
        self.frame.split_losses += [loss, before]  # of which nothing is left in the sum
        total = output.get("loss")
        if isinstance(total, Tensor):
            output["loss"] = total + coefficient(model, total, before) * (loss - before)
        output["aux_loss"] = loss
        return output


def coefficient(model: object, total: Tensor, part: Tensor) -> Any:
    """Return what a loss multiplies one of its terms by."""
    for name in COEFFICIENTS:
        if hasattr(model, name):
            return getattr(model, name)
    return slopes(total, [part])[0]


def losses_of_all_rows(model: Any, stock: nn.Module, frame: Frame) -> None:
    """Make the losses that a model gives those of all ranks' rows, where the batch is split over ranks, and only there.

    Args:
        stock: the model of transformers that it is, or holds.
    """
    if not frame.mesh.grid.nontrivial(frame.outside.dims[0]):
        return
    if hasattr(sys.modules[type(stock).__module__], FORMULA):
        stock.register_forward_hook(RouterLoss(frame), with_kwargs=True)
    model.register_forward_hook(DataLoss(frame, type(model).__name__), with_kwargs=True)
    # transformers' Trainer would have the loss divided by the labels it has seen, those of its own rows alone.
    base = model.get_base_model() if hasattr(type(model), "get_base_model") else model
    base.accepts_loss_kwargs = False
