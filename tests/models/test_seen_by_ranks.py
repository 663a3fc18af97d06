"""What runs of several ranks show of one model, together; and layers that no run has called."""

import torch
from torch import nn

from ndtp.models.observation import observe
from ndtp.models.seen_by_ranks import joined, like_siblings
from ndtp.models.sides import sides


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.norm, self.down = (
            nn.Linear(8, 16),
            nn.Linear(8, 16),
            nn.LayerNorm(8),
            nn.Linear(16, 8),
        )

    def forward(self, x):
        x = self.norm(x)
        return self.down(self.gate(x).relu() * self.up(x))


class Chosen(nn.Module):
    """Blocks and heads, of which a call runs some."""

    def __init__(self):
        super().__init__()
        self.inner, self.blocks = nn.Linear(8, 8), nn.ModuleList(Block() for _ in range(4))
        self.heads, self.odd = (
            nn.ModuleDict({"a": nn.Linear(8, 4), "b": nn.Linear(8, 4)}),
            nn.ModuleList([nn.Linear(8, 3)]),
        )

    def forward(self, x, blocks, head):
        x = self.inner(x)
        for i in blocks:
            x = x + self.blocks[i](x)
        return self.heads[head](x)


def seen_with(model, blocks, head="a"):
    found = observe(model, (torch.randn(5, 8), blocks, head))
    assert found is not None
    return found


def facts_of(seen):
    chains = {(tuple(names), last) for names, last in seen.chains if last.endswith("down")}
    groups = {frozenset(group) for group in seen.groups}
    return sides(seen), seen.sections, chains, groups, set(seen.order), seen.heads, seen.twice


def test_runs_together_show_what_one_of_all_layers_shows():
    model = Chosen()
    runs = [seen_with(model, blocks) for blocks in ((0, 2), (1,), (3, 1))]
    assert facts_of(joined(runs)) == facts_of(seen_with(model, (0, 2, 1, 3)))


def test_layers_that_nobody_called_lie_as_their_siblings():
    model = Chosen()
    found, whole = facts_of(like_siblings(seen_with(model, (1,)), model)), facts_of(seen_with(model, (1, 0, 2, 3)))
    leads_in, *rest = found[0]
    assert leads_in.pop("heads.b") == leads_in["heads.a"] and "odd.0" not in leads_in
    assert (leads_in, *rest) == whole[0]
    assert found[2:4] == (whole[2], whole[3] | {frozenset({"heads.b"})})
    assert found[4] == whole[4] | {"heads.b"}


def test_the_first_run_decides_where_runs_do_not_agree():
    model = Chosen()
    first, second = seen_with(model, (0,)), seen_with(model, (0,))
    second.groups = [[name] for name in second.order]
    second.sections = {"inner": (4, 4)}
    assert facts_of(joined([first, second]))[3] == facts_of(first)[3]
    first.sections = {"inner": (2, 6)}
    assert joined([first, second]).sections == {}
