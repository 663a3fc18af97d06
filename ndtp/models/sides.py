"""The side on which each layer and parameter of a model stands: that of hidden states, or what is inside of a block."""

from __future__ import annotations

from collections import Counter

from torch import nn

from ndtp.models.observation import Observation
from ndtp.models.roles import features, is_linear


def sides(seen: Observation) -> tuple[dict[str, bool], set[str], dict[str, bool]]:
    """The sides on which layers and parameters stand: that of hidden states, or what is inside of a block.

    Returns:
        For each layer whether it leads from hidden states inwards; the layers that lead to the side from which they
        come; and for each other parameter whether it goes with what is inside.

    Activations that must lie alike are on one side; a layer leads from one side to the other where it can.
    """
    counts = Counter(kind for edge in seen.edges.values() for kind in edge)
    neighbours: dict[int, list[int]] = {}
    for a, b in seen.edges.values():
        neighbours.setdefault(a, []).append(b)
        neighbours.setdefault(b, []).append(a)
    side: dict[int, bool] = {}
    for root, _ in counts.most_common():
        if root in side:
            continue
        side[root], waiting = False, [root]
        while waiting:
            kind = waiting.pop(0)
            for other in neighbours[kind]:
                if other not in side:
                    side[other] = not side[kind]
                    waiting.append(other)
    leads_in = {name: not side[a] for name, (a, _) in seen.edges.items()}
    turns = {name for name, (a, b) in seen.edges.items() if side[a] == side[b]}
    return leads_in, turns, {name: side.get(kind, False) for name, kind in seen.feeds.items()}


def guessed_sides(modules: dict[str, nn.Module]) -> dict[str, bool]:
    """Guess the sides of layers without a run: a layer that takes the commonest number of features leads in, one
    that gives it leads out.
    """
    sizes = {name: features(m) for name, m in modules.items() if is_linear(m, casts=True)}
    hidden = Counter(n for pair in sizes.values() for n in pair).most_common(1)
    common = hidden[0][0] if hidden else 0
    found = {}
    for name, (inside, outside) in sizes.items():
        parent = name.rpartition(".")[0]
        alike = [n for n, s in sizes.items() if n.rpartition(".")[0] == parent and s == (common, common)]
        is_last = (inside, outside) == (common, common) and len(alike) > 1 and name == alike[-1]
        found[name] = inside == common and not is_last
    return found
