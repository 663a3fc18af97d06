"""Einsums, drawn at random and read a second time: what torch makes of them, what is legal, and what of it moves."""

from __future__ import annotations

import ast
import re

import legal
import numpy as np
import torch
from simulate import Run, shard

from ndtp import Grid, Layout, LayoutError
from ndtp.algebra.einsum import OPERANDS, EinsumPlan


def contracted(tensors, letters, result, sizes):
    """A rank's einsum of arrays whose dims have letters, None for a dim of size 1; others are repeated."""
    used = sorted({letter for of in (*letters, result) for letter in of if letter})
    arguments = []
    for tensor, of in zip(tensors, letters, strict=True):
        kept = tensor.reshape([size for size, letter in zip(tensor.shape, of, strict=True) if letter])
        arguments += [kept, [used.index(letter) for letter in of if letter]]
    there = [letter for letter in result if letter and any(letter in of for of in letters)]
    found = np.einsum(*arguments, [used.index(letter) for letter in there])
    wide = found[tuple(slice(None) if letter in there else None for letter in result)]
    return np.broadcast_to(wide, [sizes[letter] if letter else 1 for letter in result])


def dense_gradients(tensors, letters, result, dc, sizes):
    for i, of in enumerate(letters):
        others = [(t, o) for j, (t, o) in enumerate(zip(tensors, letters, strict=True)) if j != i]
        yield contracted([dc, *(t for t, _ in others)], [result, *(o for _, o in others)], of, sizes)


def in_torchs_words(expression):
    """`torch.einsum`'s: a letter for each name."""
    names = dict.fromkeys(expression.replace(",", " ").replace("->", " ").split())
    letters = {name: chr(ord("a") + i) for i, name in enumerate(names)}
    return "".join(letters.get(word, word) for word in expression.replace(",", " , ").split())


def by_torch(expression, tensors, dc):
    """What `torch.einsum` makes of arrays of integers, in fp64, where they are exact; and its gradients of them all."""
    dense = [torch.tensor(tensor, dtype=torch.float64, requires_grad=True) for tensor in tensors]
    c = torch.einsum(in_torchs_words(expression), *dense)
    grads = torch.autograd.grad(c, dense, torch.tensor(dc, dtype=torch.float64))
    return c.detach().numpy(), [grad.numpy() for grad in grads]


def assert_exact(case, plan, seed=0):
    """C and all gradients on every rank are torch's, and every element that moves is as planned."""
    rng = np.random.default_rng(seed)
    tensors = [rng.integers(-3, 4, shape) for shape in case.shapes]
    letters = [plan.stored[name].letters for name in plan.operand_names]
    dc = rng.integers(-3, 4, plan.shape)
    c, gradients_of_torch = by_torch(case.expression, tensors, dc)
    run, ranks = Run(plan.grid), range(plan.grid.num_ranks)

    def lies(dense, layout):
        return [shard(dense, plan.grid, layout.dims, rank) for rank in ranks]

    held = [
        run.move("forward", name, plan, lies(tensor, plan.stored[name].layout))
        for name, tensor in zip(plan.operand_names, tensors, strict=True)
    ]
    local = {letter: plan.sizes[letter] // plan.grid.size(axes) for letter, axes in plan.orders.items()}
    parts = [contracted([each[rank] for each in held], letters, plan.result, local) for rank in ranks]
    found = {"C": run.move("forward", "C", plan, parts)}
    dc_held = run.move("dgrad", "dC", plan, lies(dc, plan.out))
    gradients = [
        list(dense_gradients([each[rank] for each in held], letters, plan.result, dc_held[rank], local))
        for rank in ranks
    ]
    wanted = {"C": (c, plan.out)}
    for i, name in enumerate(plan.operand_names):
        found[f"d{name}"] = run.move("wgrad" if i else "dgrad", f"d{name}", plan, [own[i] for own in gradients])
        wanted[f"d{name}"] = gradients_of_torch[i], plan.stored[name].layout
    for name, shards in found.items():
        dense, layout = wanted[name]
        for rank, own in enumerate(shards):
            expected = shard(dense, plan.grid, layout.dims, rank)
            assert own.shape == expected.shape and (own == expected).all(), (name, rank, str(plan))
    assert {entry.key: entry.elements for entry in plan.volume()} == dict(run.received), str(plan)


class Case:
    """An einsum, what the design says of it, and what `EinsumPlan` makes of it."""

    def __init__(self, grid, expression, dims, out=None, roles=None, shapes=None):
        self.grid, self.expression, self.dims, self.out, self.roles = grid, expression, list(dims), out, roles or {}
        left, right = expression.split("->")
        self.names, self.result = [own.split() for own in left.split(",")], right.split()
        self.shapes = shapes or [[grid.num_ranks] * len(own) for own in self.names]
        self.letters = []
        for own, shape in zip(self.names, self.shapes, strict=True):
            wide = [max(s[o.index(n)] for o, s in zip(self.names, self.shapes, strict=True) if n in o) for n in own]
            self.letters.append([n if s == w else None for n, s, w in zip(own, shape, wide, strict=True)])
        self.sizes = dict(zip(grid.names, grid.shape, strict=True))
        self.of_axis = {axis: self.role(axis) for axis in grid.names}
        self.of_axis = {axis: letter for axis, letter in self.of_axis.items() if letter}
        tensors = [*zip(self.dims, self.letters, strict=True)] + ([(out, self.result)] if out is not None else [])
        self.legal = legal.is_legal(self.sizes, self.of_axis, tensors)

    def role(self, axis):
        """The table of the design, top to bottom."""
        if axis in self.roles:
            return self.roles[axis]
        split = [legal.place(axis, *each) for each in zip(self.dims, self.letters, strict=True)]
        split = [letter for letter in split if letter]

        def having(letter):
            return [i for i, of in enumerate(self.letters) if letter in of]

        rows = [
            lambda letter: letter in self.result and len(having(letter)) == 1 and having(letter) != [0],
            lambda letter: letter in self.result and having(letter) == [0],
            lambda letter: letter in self.result,
            lambda letter: True,
        ]
        return next((letter for row in rows for letter in split if row(letter)), None)

    def plan(self, **changed):
        dims = [changed.get(OPERANDS[i], own) for i, own in enumerate(self.dims)]
        out = changed.get("C", self.out)
        layouts = [Layout(self.grid, *own) for own in dims]
        return EinsumPlan(
            self.expression, layouts, self.shapes, None if out is None else Layout(self.grid, *out), self.roles
        )

    def check(self):
        """True if it is exact, False if it is refused with a fix that works; nothing else passes."""
        try:
            plan = self.plan()
        except LayoutError as error:
            assert not self.legal, f"legal by the design, yet refused: {error}"
            self.check_fix(error)
            return False
        assert {g: r for g, r in plan.roles.items() if self.sizes[g] > 1} == {
            g: r for g, r in self.of_axis.items() if self.sizes[g] > 1
        }
        assert self.legal
        assert_exact(self, plan)
        return True

    def check_fix(self, error):
        changed = {}
        for _ in range(8):
            found = re.search(r"\n  fix: ([A-Z]) as (\{.*\})$", str(error))
            assert found, error
            mapping = ast.literal_eval(found.group(2))
            own = self.result if found.group(1) == "C" else self.names[OPERANDS.index(found.group(1))]
            axes = [mapping.get(name, ()) for name in own]
            changed[found.group(1)] = tuple((each,) if isinstance(each, str) else each for each in axes)
            try:
                plan = self.plan(**changed)
            except LayoutError as another:
                error = another
                continue
            assert_exact(self, plan)
            return
        raise AssertionError(f"no end of fixes: {error}")


def random_case(rng, grid=None):
    """One to three operands of up to four letters, broadcast dims, outputs and roles, on grids of up to nine ranks."""
    axes = rng.sample("xyz", rng.randint(1, 3))
    grid = grid or Grid({axis: rng.choice((1, 2, 2, 3) if len(axes) < 3 else (1, 2)) for axis in axes})
    letters = ["b", "m", "k", "head"][: rng.randint(1, 4)]
    count = rng.choice((1, 2, 2, 2, 3))
    names = [[] for _ in range(count)]
    for letter in letters:
        for i in rng.sample(range(count), rng.randint(1, count)):
            names[i].append(letter)
    for own in names:
        rng.shuffle(own)
    result = rng.sample(letters, rng.randint(0, len(letters)))

    def dims(own, units=()):
        split = [[] for _ in own]
        places = [dim for dim in range(len(own)) if dim not in units]
        for axis in rng.sample(grid.names, len(grid.names)):
            if places and rng.random() < 0.7:
                split[rng.choice(places)].append(axis)
        return tuple(map(tuple, split))

    units = [
        [d for d, n in enumerate(own) if rng.random() < 0.15 and any(n in names[j] for j in range(i))]
        for i, own in enumerate(names)
    ]
    whole = {letter: grid.num_ranks * rng.choice((1, 1, 2)) for letter in letters}
    shapes = [[1 if d in units[i] else whole[n] for d, n in enumerate(own)] for i, own in enumerate(names)]
    for own, shape in zip(names, shapes, strict=True):  # a letter that one dim of size 1 alone has is no broadcast
        for d, n in enumerate(own):
            if all(s[o.index(n)] == 1 for o, s in zip(names, shapes, strict=True) if n in o):
                shape[d] = whole[n]
    expression = f"{', '.join(map(' '.join, names))} -> {' '.join(result)}"
    own_dims = [dims(own, [d for d, s in enumerate(shape) if s == 1 != grid.num_ranks]) for own, shape in
                zip(names, shapes, strict=True)]  # fmt: skip
    out = dims(result) if rng.random() < 0.3 else None
    roles = {rng.choice(grid.names): rng.choice(letters)} if rng.random() < 0.2 else None
    return Case(grid, expression, own_dims, out, roles, shapes)
