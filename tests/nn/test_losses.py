"""Cross entropy on split classes, alone and in chunks with the head, against torch's: values, gradients, bytes."""

import pytest
import torch
import torch.nn.functional as F
from module_case import EIGHT, FOUR, TWO, check_gradients, close, randn, shard
from products import mesh_of
from turns import by_turns

import ndtp
from ndtp import CommMeter, Grid, Layout
from ndtp.ops.memory import LiveBytes
from ndtp.testing import assert_close_to_dense

CLASSES, FEATURES, TOKENS = 21, 8, 16


def targets_of(tokens, ignored=True):
    targets = torch.randint(0, CLASSES, (tokens,), generator=torch.Generator().manual_seed(3))
    if ignored:
        targets[1::5] = -100
    return targets


def dense_loss(logits, targets, z=0.0, **options):
    loss = F.cross_entropy(logits, targets, **options)
    if z:
        squares = z * logits.logsumexp(1).square() * (targets != -100)
        mean = options.get("reduction", "mean") == "mean"
        loss = loss + (squares.sum() / (targets != -100).sum() if mean else squares.sum())
    return loss


def padded(x, width, value=0.0):
    return F.pad(x, (0, width - x.shape[1]), value=value)


WEIGHTS = torch.linspace(0.5, 2.0, CLASSES, dtype=torch.float64)
FORMS = [
    {},
    {"reduction": "sum", "label_smoothing": 0.1},
    {"z_loss": 1e-2, "label_smoothing": 0.2},
    {"weight": WEIGHTS, "label_smoothing": 0.1},
]


def check_split(cases, tokens=TOKENS):
    for sizes, scheme in cases:
        mesh = mesh_of(Grid(sizes))
        layout = ndtp.nn.Linear(FEATURES * 2, 48, mesh=mesh, scheme=scheme).out_layout
        width = layout.padded_shape((tokens, 3 * CLASSES))[1]  # ranks with padding and nothing else
        for form, whole in zip(FORMS, (True, False, True, True), strict=True):
            where = f"{mesh.grid}, {scheme}, {form}"
            logits, targets = (4 * randn(tokens, CLASSES)).requires_grad_(), targets_of(tokens)
            # Padding that would win every maximum, if it were let in.
            mine = shard(padded(logits, width, 1e4), layout, mesh).requires_grad_()
            given = targets if whole else shard(targets, Layout(mesh.grid, layout.dims[0]), mesh)
            module = ndtp.nn.CrossEntropy(layout=layout, mesh=mesh, classes=CLASSES, **form)
            with CommMeter() as meter:
                loss = module(mine, given)
                loss.backward()
            options = {key: value for key, value in form.items() if key != "z_loss"}
            expected = dense_loss(logits, targets, form.get("z_loss", 0.0), **options)
            expected.backward()
            close(loss, expected, f"{where}: loss")
            close(mine.grad, shard(padded(logits.grad, width), layout, mesh), f"{where}: gradient")
            assert meter.volume == module.volume(tokens, torch.float64), f"{where}: {meter.volume}"
            assert not meter.volume.backward, "nothing moves in backward"
        rows = ndtp.nn.cross_entropy(
            mine.detach(), targets, layout=layout, mesh=mesh, classes=CLASSES, reduction="none"
        )
        each = F.cross_entropy(logits, targets, reduction="none")
        close(rows, shard(each, Layout(mesh.grid, layout.dims[0]), mesh), f"{where}: none")


def test_equals_dense_on_grids(ranks):
    check_split([({"x": 1}, "1d")])
    for num_ranks, cases in by_turns([(2, TWO), (4, FOUR), (8, EIGHT)], 3):
        ranks(num_ranks).run(check_split, cases)


HEADS = [
    (FORMS[0], True, 4, True),
    (FORMS[2], False, 8, False),
    (FORMS[1], True, 999, True),
    (FORMS[3], False, 5, True),
]


def check_fused(cases, first, tokens=24):
    """Two of the forms by turns; all of them on every grid, without the head: `check_split`."""
    for turn, (sizes, scheme) in enumerate(cases, first):
        mesh = mesh_of(Grid(sizes))
        for form, bias, rows, whole in HEADS[turn % 2 :: 2]:
            where = f"{mesh.grid}, {scheme}, {form}, {rows} rows"
            head = torch.nn.Linear(FEATURES, CLASSES, bias).double()
            with torch.no_grad():
                for i, parameter in enumerate(head.parameters()):
                    parameter.copy_(randn(*parameter.shape, seed=i))
            module = ndtp.nn.LinearCrossEntropy.from_dense(head, mesh=mesh, scheme=scheme, chunk_rows=rows, **form)
            x, targets = randn(tokens, FEATURES, seed=9).requires_grad_(), targets_of(tokens)
            mine = shard(padded(x, module.head.padded_in), module.in_layout, mesh).requires_grad_()
            row_layout = Layout(mesh.grid, module.in_layout.dims[0])
            given = targets if whole else shard(targets, row_layout, mesh)
            with CommMeter() as meter:
                loss = module(mine, given)
                (2 * loss).backward()
            options = {key: value for key, value in form.items() if key != "z_loss"}
            expected = dense_loss(head(x), targets, form.get("z_loss", 0.0), **options)
            (2 * expected).backward()
            close(loss, expected, f"{where}: loss")
            close(mine.grad, shard(padded(x.grad, module.head.padded_in), module.in_layout, mesh), f"{where}: dx")
            check_gradients(module.head, head, where)
            gathers = not whole and row_layout.num_splits(0) > 1
            predicted = module.volume(tokens, gathers_targets=gathers)
            assert meter.volume == predicted, f"{where}: measured {meter.volume}, predicted {predicted}"
            assert not mesh.collectives.in_flight, where
            with torch.no_grad():
                close(module(mine, given), expected, f"{where}: no gradients")


def test_head_and_loss_in_chunks(ranks):
    check_fused([({"x": 1}, "1d")], 0)
    for num_ranks, cases, first in by_turns([(4, FOUR, 1), (8, EIGHT, 0), (2, TWO, 1)], 3):
        ranks(num_ranks).run(check_fused, cases, first)


def check_memory():
    """No more than a chunk of logits (and what is computed of it) lives at a time."""
    mesh = mesh_of(Grid(x=2))
    tokens, classes, chunk = 256, 512, 16
    module = ndtp.nn.LinearCrossEntropy(ndtp.nn.Linear(4, classes, mesh=mesh, scheme="1d-sp", seed=0), chunk_rows=chunk)
    x = torch.randn(module.in_layout.shard_shape((tokens, 4))).requires_grad_()
    with LiveBytes() as live:
        module(x, torch.zeros(tokens, dtype=torch.long)).backward()
    assert live.peak < tokens * classes // 2 * 4 / 2, f"{live.peak} bytes: as much as half of the logits"
    assert live.peak < 8 * chunk * classes // 2 * 4 + 2**14
    assert module.memory(tokens).peak < tokens * classes // 2 * 4 / 2


def check_extremes():
    """Rows with one class that is far above, rows of -inf but one, fp32 and bf16 logits: as near as torch's."""
    mesh = mesh_of(Grid(x=2))
    layout = Layout(mesh.grid, None, "x")
    for dtype in (torch.float32, torch.bfloat16):
        logits = (3 * randn(TOKENS, CLASSES + 1)).to(dtype)
        logits[0, 3], logits[1] = 3e4, -torch.inf
        logits[1, 20] = 2.0
        targets = targets_of(TOKENS, ignored=False)
        targets[0], targets[1] = 3, 20
        mine = shard(logits, layout, mesh).requires_grad_()
        loss = ndtp.nn.cross_entropy(mine, targets, layout=layout, mesh=mesh)
        loss.backward()
        whole, exact = (logits.to(t, copy=True).requires_grad_() for t in (dtype, torch.float64))
        for each in (whole, exact):
            F.cross_entropy(each, targets).backward()
        assert loss.dtype == torch.float32
        assert_close_to_dense(mine.grad, *(shard(t.grad, layout, mesh) for t in (whole, exact)))
        close(loss.double().round(decimals=4), F.cross_entropy(exact, targets).round(decimals=4), "loss")
        mine = mine.detach().requires_grad_()
        none = ndtp.nn.cross_entropy(mine, torch.full_like(targets, -100), layout=layout, mesh=mesh)
        none.backward()
        assert none.isnan() and not mine.grad.any(), "as torch has it"
    fused = ndtp.nn.LinearCrossEntropy(ndtp.nn.Linear(FEATURES, CLASSES + 1, mesh=mesh, scheme="1d-sp", seed=0))
    x = torch.randn(fused.in_layout.shard_shape((TOKENS, FEATURES))).requires_grad_()
    none = fused(x, torch.full((TOKENS,), -100))
    none.backward()
    assert none.isnan() and not x.grad.any(), "as torch has it"


def wrong_targets():
    """Rows of one rank alone have a wrong target; all ranks say so."""
    mesh = mesh_of(Grid(dp=2))
    layout = Layout(mesh.grid, "dp", None)
    targets = torch.zeros(4, dtype=torch.long)
    if mesh.rank:
        targets[2] = CLASSES
    messages = []
    for call in (
        lambda: ndtp.nn.cross_entropy(torch.zeros(4, CLASSES), targets, layout=layout, mesh=mesh),
        lambda: ndtp.nn.cross_entropy(torch.zeros(4, CLASSES), targets[:3], layout=layout, mesh=mesh),
        lambda: ndtp.nn.cross_entropy(torch.zeros(4, CLASSES), targets, layout=layout, mesh=mesh, reduction="max"),
    ):
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_memory_extremes_and_errors(ranks):
    ranks(2).run(check_memory)
    ranks(2).run(check_extremes)
    one, other = ranks(2).run(wrong_targets)
    assert one == other
    for message, word in zip(
        one, ("1 targets are neither one of 21", "for the one or the other", "'max'"), strict=True
    ):
        assert word in message
    dense = torch.nn.CrossEntropyLoss(torch.ones(4), label_smoothing=0.1)
    mesh = ndtp.ProcessGrid(Grid(x=1))
    mine = ndtp.nn.CrossEntropy.from_dense(dense, layout=Layout(mesh.grid, None, "x"), mesh=mesh, classes=4)
    assert mine.to_dense().label_smoothing == 0.1
    assert mine.to_dense().weight.tolist() == [1.0] * 4 and mine.memory(8).kept > 0
    with pytest.raises(ndtp.LayoutError, match=r"weights are .5,.; there are 4 classes"):
        mine.weight = torch.ones(5)
        mine(torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))
