"""Runs that show each rank other layers of a model, as code does that goes by its rows: experts, layers left out.

What any rank with rows of its own has seen counts on all of them.  A layer that nobody has seen lies as another one of
its `nn.ModuleList` that is built alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from ndtp.collectives.cross_check import differing
from ndtp.errors import MismatchError
from ndtp.models.observation import Observation
from ndtp.models.observed_chains import Kinds
from ndtp.models.roles import is_linear
from ndtp.runtime.process_grid import ProcessGrid


def seen_by_all(
    seen: Observation | None, model: nn.Module, mesh: ProcessGrid, rows: Sequence[str], what: str
) -> Observation | None:
    """Return what all ranks together have seen of a model, the same on each of them; None where its runs failed.

    Args:
        rows: the axes along which ranks have rows of their own.
        what: the run, for errors.

    Raises:
        MismatchError: ranks with the same rows have seen other things, or a run failed on some ranks alone.
    """
    by_rank = differing(mesh.groups, _text_of(seen)) if mesh.groups.kind.has_peers else None
    if by_rank is not None:
        first: dict[tuple[int, ...], int] = {}
        for rank, text in by_rank.items():
            coordinate = mesh.grid.coordinate(rank)
            other = first.setdefault(tuple(coordinate[axis] for axis in rows), rank)
            if text == _text_of(None):
                raise MismatchError(
                    f"parallelize: the {what} of {type(model).__name__} failed on rank {rank}, and did not on others\n"
                    "  fix: inputs with which the model runs, on every rank"
                )
            if text != by_rank[other]:
                raise MismatchError(
                    f"parallelize: the {what} of {type(model).__name__} shows other layers on rank {rank} than on rank "
                    f"{other}\n  fix: the same inputs on every rank, but for rows along {' '.join(rows) or 'dp'}"
                )
        seen = joined([_made_of(by_rank[rank]) for rank in first.values()])
    return None if seen is None else like_siblings(seen, model)


def _text_of(seen: Observation | None) -> str:
    return "" if seen is None else json.dumps(asdict(seen), default=sorted)  # it has sets


def _made_of(text: str) -> Observation:
    told = json.loads(text)
    return Observation(
        edges={name: (a, b) for name, (a, b) in told["edges"].items()},
        groups=told["groups"],
        sections={name: tuple(parts) for name, parts in told["sections"].items()},
        order=told["order"],
        feeds=told["feeds"],
        twice=set(told["twice"]),
        chains=[(tuple(names), last) for names, last in told["chains"]],
        heads=set(told["heads"]),
    )


def joined(runs: Sequence[Observation]) -> Observation:
    """Return what several runs of a model show together; where they do not agree the first one decides, or none."""
    kinds, made, grouped = Kinds(), Observation(), set[str]()
    apart: set[str] = set()  # layers whose features the runs take apart in different ways
    for run in runs:
        own: dict[int, int] = {}  # the kinds of this run
        for name, edge in run.edges.items():
            found = [own[kind] if kind in own else own.setdefault(kind, kinds.new()) for kind in edge]
            for kind, known in zip(found, made.edges.get(name, ()), strict=False):
                kinds.join([known, kind])
            made.edges.setdefault(name, (found[0], found[1]))
        for name, kind in run.feeds.items():
            found_kind = own[kind] if kind in own else own.setdefault(kind, kinds.new())
            kinds.join([made.feeds.setdefault(name, found_kind), found_kind])
        made.groups += [rest for group in run.groups if (rest := [name for name in group if name not in grouped])]
        grouped.update(name for group in run.groups for name in group)
        apart |= {name for name, parts in run.sections.items() if made.sections.setdefault(name, parts) != parts}
        made.order += [name for name in run.order if name not in made.order]
        made.chains += [chain for chain in run.chains if chain not in made.chains]
        made.twice |= run.twice
        made.heads |= run.heads
    made.edges = {name: (kinds.find(a), kinds.find(b)) for name, (a, b) in made.edges.items()}
    made.feeds = {name: kinds.find(kind) for name, kind in made.feeds.items()}
    made.sections = {name: parts for name, parts in made.sections.items() if name not in apart}
    return made


def like_siblings(seen: Observation, model: nn.Module) -> Observation:
    """Return what was seen, and of layers of a list that nobody has called what was seen of a sibling."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            alike: dict[str, list[str]] = {}
            for child, sibling in _unseen(seen, name, module):
                alike.setdefault(sibling, []).append(child)
            seen = _with_copies(seen, f"{name}." if name else "", alike) if alike else seen
    return seen


def _unseen(seen: Observation, name: str, container: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield the names of children of which no layer was seen, each with that of one that is built alike and was."""
    known: dict[object, str] = {}
    unknown = []
    for key, child in container.named_children():
        own, layers = (
            f"{name}.{key}" if name else key,
            [n for n, m in child.named_modules() if is_linear(m, casts=True)],
        )
        built = tuple((n, type(m)) for n, m in child.named_modules()), _shapes(child)
        if any((f"{own}.{n}" if n else own) in seen.edges for n in layers):
            known.setdefault(built, own)
        elif layers:
            unknown.append((own, built))
    yield from ((own, known[built]) for own, built in unknown if built in known)


def _shapes(module: nn.Module) -> tuple[object, ...]:
    return tuple((name, p.shape) for name, p in module.named_parameters())


def _with_copies(seen: Observation, begins: str, alike: Mapping[str, Sequence[str]]) -> Observation:
    """Return what was seen, and of some children of a container once more under the names of others.

    Args:
        begins: the names of what is in the container.
        alike: by the name of a child, those that are built like it.
    """

    def copies(names: Sequence[str]) -> list[list[str]]:
        """Return, for each other child, the names of what is in one child as they are there."""
        found: dict[str, list[str]] = {}
        for name in names:
            if name.startswith(begins):
                own = begins + name[len(begins) :].partition(".")[0]
                for child in alike.get(own, ()):
                    found.setdefault(child, []).append(child + name[len(own) :])
        return list(found.values())

    def flat(names: Iterable[str]) -> list[str]:
        return [each for name in names for (each,) in copies([name])]

    def of_each(facts: Mapping[str, object]) -> dict[str, Any]:
        return {each: fact for name, fact in facts.items() for each in flat([name])}

    chains = ((names, found) for names, last in seen.chains for found in copies([*names, last]))
    return replace(
        seen,
        edges=seen.edges | of_each(seen.edges),
        groups=seen.groups + [found for group in seen.groups for found in copies(group)],
        sections=seen.sections | of_each(seen.sections),
        order=seen.order + flat(seen.order),
        feeds=seen.feeds | of_each(seen.feeds),
        twice=seen.twice.union(flat(seen.twice)),
        chains=seen.chains + [(tuple(ups), down) for names, (*ups, down) in chains if len(ups) == len(names)],
        heads=seen.heads.union(flat(seen.heads)),
    )
