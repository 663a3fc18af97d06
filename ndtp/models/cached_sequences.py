"""Caches of keys and values whose sequences are split over ranks: picking beams, repeating and selecting sequences.

The attention code of a stock model keeps in its cache the keys and values of this rank's sequences.  Code that
generates text picks sequences of the whole batch: beam search carries on the best of its beams.  Here a rank gets the
sequences that it lacks from the ranks that have them, and nothing moves where beams stay on their ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ndtp.algebra.layout import Layout
from ndtp.algebra.row_flow import RowMove
from ndtp.collectives.rows_exchange import start_rows
from ndtp.errors import LayoutError
from ndtp.models.adopted import class_of
from ndtp.models.frame import Frame
from ndtp.ops.products import relayout
from ndtp.split.tensor import SplitTensor

OF_ALL = ("conv_states", "recurrent_states")  # what layers other than attention keep, of the whole batch


@dataclass(frozen=True)
class Sequences:
    """The sequences that a cache holds on each rank.

    Attributes:
        inner: the layout of what attention computes, rows of whole sequences.
        batch: the number of sequences of all ranks (of one dp rank).
    """

    frame: Frame
    inner: Layout
    batch: int

    def __deepcopy__(self, memo: object) -> Sequences:
        return self

    @property
    def axes(self) -> tuple[str, ...]:
        return self.inner.dims[0][len(self.frame.outside.dims[0]) :]

    def held(self, batch: int) -> int:
        """Return the number of sequences that a rank holds of a batch, padding included."""
        return self.frame.padded(batch) // self.frame.splits(self.inner)

    def picks(self, index: Many[int]) -> Picks:
        """Return who sends what, so that sequence i of all ranks becomes what sequence `index[i]` is."""
        mesh = self.frame.mesh
        me = mesh.grid.index(mesh.rank, self.axes)
        return picks_of(tuple(index), self.held(self.batch), self.held(len(index)), self.frame.splits(self.inner), me)

    def moved(self, tensors: Many[Tensor], picks: Picks) -> list[Tensor]:
        """Return the tensors [sequences, ..] of this rank with the sequences that were picked."""
        if not picks.is_local:
            mesh = self.frame.mesh
            move = RowMove("all_to_all", self.axes, picks.sends, picks.receives, picks.me)
            leaving = [_rows(x, picks.sent) for x in tensors]
            started = [start_rows(x, move, mesh.collectives, "cache sequences", "forward") for x in leaving]
            tensors = [torch.cat([x, handle.wait()]) for x, handle in zip(tensors, started, strict=True)]
        return [_rows(x, picks.taken) for x in tensors]


@dataclass(frozen=True)
class Picks:
    """The sequences that one rank sends, receives and then takes.

    Attributes:
        sent: those of its sequences that leave, ordered by the rank that gets them; `sends` counts them for each rank.
        receives: how many arrive from each rank.
        taken: for each new sequence its place among those of this rank, behind which the received ones lie.
        is_local: whether no rank lacks a sequence.
    """

    me: int
    sent: tuple[int, ...]
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    taken: tuple[int, ...]
    is_local: bool


@lru_cache(maxsize=256)
def picks_of(index: tuple[int, ...], before: int, after: int, ranks: int, me: int) -> Picks:
    """Return the picks of rank `me` where every rank holds `before` sequences, and `after` then.

    Args:
        index: for each new sequence the old one that it becomes; what lies behind these is padding.
    """
    wants = []
    for rank in range(ranks):
        mine = index[rank * after : (rank + 1) * after]
        wants.append([*mine, *[rank * before] * (after - len(mine))])
    lacks = [sorted({i for i in wanted if i // before != rank}) for rank, wanted in enumerate(wants)]
    given = [[i - me * before for i in lacked if i // before == me] for lacked in lacks]
    arriving = {i: before + place for place, i in enumerate(lacks[me])}
    return Picks(
        me,
        sent=tuple(i for each in given for i in each),
        sends=tuple(map(len, given)),
        receives=tuple(sum(i // before == rank for i in lacks[me]) for rank in range(ranks)),
        taken=tuple(arriving[i] if i in arriving else i - me * before for i in wants[me]),
        is_local=not any(lacks),
    )


def _rows(x: Tensor, index: Many[int]) -> Tensor:
    return x.index_select(0, torch.tensor(index, dtype=torch.long).to(x.device, non_blocking=True))


class CacheOfRank:
    """The class of a cache whose attention layers hold the sequences of one rank.

    Attributes:
        ndtp_sequences: how sequences lie on ranks.
        ndtp_layers: the numbers of these layers, where the others hold the whole batch; None: of all layers.
    """

    ndtp_sequences: Sequences
    ndtp_layers: set[int] | None
    layers: list[Any]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._pick(beam_idx, "reorder_cache", beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        index = torch.arange(self.ndtp_sequences.batch).repeat_interleave(repeats)
        self._pick(index, "batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._pick(torch.arange(self.ndtp_sequences.batch)[indices.cpu()], "batch_select_indices", indices)

    def _pick(self, index: Tensor, name: str, given: Tensor | int) -> None:
        """Pick sequences in all layers; all that leaves is on its way before anything is waited for."""
        sequences = self.ndtp_sequences
        index_of_all = index.tolist()
        picks = sequences.picks(index_of_all)
        found = []
        for number, layer in enumerate(self.layers):
            if self.ndtp_layers is not None and number not in self.ndtp_layers:
                getattr(layer, name)(given)
                continue
            if hasattr(layer, "_quantize"):
                self._pick_quantised(layer, picks, name)
                continue
            held = sequences.held(sequences.batch)
            for key, value in vars(layer).items():
                is_held = isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] == held
                if is_held and not isinstance(value, SplitTensor):
                    found.append((layer, key))
                elif key in OF_ALL and value is not None:
                    for place, state in enumerate(value):
                        value[place] = state if state is None else state[index.to(state.device)]
        moved = sequences.moved([getattr(layer, key) for layer, key in found], picks)
        for (layer, key), tensor in zip(found, moved, strict=True):
            setattr(layer, key, tensor)
        self.ndtp_sequences = Sequences(sequences.frame, sequences.inner, len(index_of_all))

    def _pick_quantised(self, layer: Any, picks: Picks, name: str) -> None:
        """Pick among the sequences of this rank: what is packed has no rows that could be sent.

        Raises:
            LayoutError: a rank lacks a sequence.
        """
        if not picks.is_local or name != "reorder_cache":
            raise LayoutError(
                f"{type(self).__name__}.{name}: a beam goes on on another rank, and {type(layer).__name__} holds "
                "quantised keys, which do not travel\n  fix: a batch that the axes of rows divide, so that beams of a "
                "sequence are on one rank; another cache; or a grid that splits no rows (scheme='1d')"
            )
        layer.reorder_cache(torch.tensor(picks.taken))


def lay_caches(
    arguments: Mapping[str, Any], frame: Frame, inner: Layout, batch: int, layer: int | None, of_tokens: bool
) -> None:
    """Let the caches among the arguments of an attention layer hold what its code works on, before it runs.

    Args:
        layer: the number of the layer in its caches; None: it has none, and the others are taken to be like it.
        of_tokens: whether the code works on tokens of all sequences (`ndtp.models.cut_sequences`), for which a cache
            holds the whole batch; else it works on the sequences of this rank.
    """
    for value in arguments.values():
        if type(value) is dict:  # what a forward takes as **kwargs
            lay_caches(value, frame, inner, batch, layer, of_tokens)
        for cache in _plain_caches(value):
            numbers = range(len(cache.layers)) if layer is None else (layer,)
            held = [each for number in numbers for each in cache.layers[number : number + 1]]
            if not isinstance(cache, CacheOfRank):
                if of_tokens:
                    continue
                cache.__class__ = class_of(CacheOfRank, type(cache))
                cache.ndtp_layers = set()
            of_rank = cache.ndtp_layers is None or cache.ndtp_layers.issuperset(numbers)
            if of_tokens:
                if of_rank and held:
                    _change(held, cache.ndtp_sequences, to_rank=False)
                    known = set(range(len(cache.layers))) if cache.ndtp_layers is None else cache.ndtp_layers
                    cache.ndtp_layers = known - set(numbers)
                continue
            cache.ndtp_sequences = Sequences(frame, inner, batch)
            _change(held, cache.ndtp_sequences, to_rank=True)
            if layer is None:
                cache.ndtp_layers = None
            elif cache.ndtp_layers is not None:
                cache.ndtp_layers.add(layer)


def refuse_filled_cache(value: object, layer: int | None, core: Any) -> None:
    """Refuse a cache that came with keys of its own, where this rank's are those of other sequences or heads.

    Args:
        layer: the number of the layer in its caches.
        core: of the attention, a `ndtp.models.attention_core.Core`.

    Raises:
        LayoutError: names what the cache has.
    """
    for cache in _plain_caches(value) if layer is not None else ():
        for held in cache.layers[layer : layer + 1]:  # type: ignore[operator]
            keys: Any = getattr(held, "keys", None)
            is_whole = isinstance(keys, Tensor) and not isinstance(keys, SplitTensor) and keys.dim() == 4
            if not is_whole:
                continue
            here = core.seen(core.given)[0], len(core.kv_per_rank)
            if here != tuple(keys.shape[:2]):
                raise LayoutError(
                    f"parallelize: '{core.name}' got a cache with keys {tuple(keys.shape)} in it, of sequences and "
                    f"heads; this rank has {here[0]} sequences and {here[1]} heads of them\n  fix: an empty cache, "
                    "which the split model fills; or attention that stays whole, keep=['*self_attn*']"
                )


def _change(layers: Many[object], sequences: Sequences, to_rank: bool) -> None:
    """Let layers of a cache hold the whole batch instead of the sequences of a rank, or the other way."""
    frame = sequences.frame
    mesh, held = frame.mesh, sequences.held(sequences.batch)
    for layer in layers:
        for key, value in vars(layer).items():
            if not isinstance(value, Tensor) or value.dim() < 2:
                continue
            if to_rank and isinstance(value, SplitTensor):
                rows = value.gathered()
                rows = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, frame.padded(len(rows)) - len(rows)))
                start = mesh.grid.index(mesh.rank, sequences.axes) * held
                setattr(layer, key, rows[start : start + held].clone())
            elif not to_rank and not isinstance(value, SplitTensor) and value.shape[0] == held:
                split, whole = Layout(mesh.grid, sequences.axes, None), Layout(mesh.grid, None, None)
                rows = relayout(value.flatten(1), split, whole, mesh, "cache sequences")
                setattr(layer, key, rows[: sequences.batch].unflatten(1, value.shape[1:]))


def _plain_caches(value: object) -> list[Any]:
    """Return the caches that have layers: a cache itself, or those of a decoder and of its cross attention."""
    if not hasattr(value, "reorder_cache"):
        return []
    if hasattr(value, "layers"):
        return [value]
    pair = (getattr(value, name, None) for name in ("self_attention_cache", "cross_attention_cache"))
    return [each for each in pair if hasattr(each, "layers")]
