"""Every architecture from grid to grid by checkpoints, optimizer included: the bits, and the training that goes on.

    python tests/checkpoints/every_checkpoint.py [--json bench/results/checkpoints.json] [--only Llama GPT2] [--all]

Four local ranks, small random models in fp32 under AdamW.  Each architecture goes from dense to a grid, from there to
another, and back; which two, goes round.  `--all`: on from grid to grid, through all seven.  `test_training_state.py`
does the same with one architecture of each kind.

    bits       what was saved on the grid before in the list, or by the dense model, is read on this one and saved
               again: a dense model reads the same bits from both, those of its optimizer included
    same grid  ten steps, a checkpoint, a new model that reads it, ten more: the bits of twenty without interruption
    elsewhere  ten steps on the grid before and ten on this one, against twenty dense ones: within FACTOR times what
               those in fp32 are off those in fp64, or FLOOR_EPS times eps of the largest magnitude
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # of `products`
sys.path.append(str(Path(__file__).parents[1] / "models"))  # of `architectures`

import architectures
import torch
import transformers.modeling_layers
import transformers.modeling_utils  # noqa: F401  # so that ranks are forked with it
from against_dense import FACTOR, FLOOR_EPS, InDouble, build
from against_dense import SMALL_GRIDS as GRIDS
from every_grid import write
from ndtp.checkpoint import load, save
from products import mesh_of

import ndtp
import ndtp.testing
from ndtp import Grid
from ndtp.errors import CheckpointError

STEPS, RANKS, BATCH = 10, 4, 8


def adamw(model):
    """Two groups, as programs have them; with an eps of 1e-8 rounding of gradients that are zero would grow."""
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 3e-4}]
    return torch.optim.AdamW(groups, lr=1e-3, eps=1e-3)


def train(model, optimizer, name, first, last, rows=slice(None), dtype=torch.float32):
    """Steps of one batch, which is turned by a sequence from step to step."""
    for at in range(first, last):
        given = {key: value.roll(at, 0)[rows] for key, value in architectures.inputs(name, BATCH).items()}
        given = {key: x.to(dtype) if x.is_floating_point() else x for key, x in given.items()}
        model(**given).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def held(model, optimizer):
    """All that is saved of a dense model, by name."""
    state = {f"state.{name}.{i}": x for i, kept in optimizer.state_dict()["state"].items() for name, x in kept.items()}
    return {f"model.{key}": value for key, value in model.state_dict().items()} | state


def values(model):
    """Its parameters, whole; a collective."""
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


def same_bits(mine, theirs):
    return [key for key in theirs if key not in mine or not torch.equal(mine[key], theirs[key])]


def parallel(name, grid):
    axes, scheme = GRIDS[grid]
    model = ndtp.parallelize(build(name), mesh_of(Grid(axes)), scheme=scheme)
    return model, adamw(model)


def on_grid(folder, name, grid, before):
    """On every rank: a run without interruption and one with, and one that another grid began."""
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # on how it gathers what is compared
    mesh = mesh_of(Grid(GRIDS[grid][0]))
    count = BATCH // mesh.grid.size([axis for axis in mesh.grid if axis == "dp"])
    rows = slice(mesh.coordinate.get("dp", 0) * count, (mesh.coordinate.get("dp", 0) + 1) * count)
    model, optimizer = parallel(name, grid)
    train(model, optimizer, name, 0, STEPS, rows)
    save(model, optimizer, folder / grid)
    train(model, optimizer, name, STEPS, 2 * STEPS, rows)
    again, other = parallel(name, grid)
    load(again, other, folder / grid)
    train(again, other, name, STEPS, 2 * STEPS, rows)
    local = lambda model: {n: p._local_tensor for n, p in model.named_parameters()}  # noqa: E731
    differ = same_bits(local(again), local(model))
    load(again, other, folder / before)
    save(again, other, folder / "again")
    train(again, other, name, STEPS, 2 * STEPS, rows)
    moved = values(again)
    return {"differ": differ, "moved": moved if mesh.rank == 0 else None}


def furthest(moved, dense, exact):
    """The parameter furthest from fp64, in units such that FACTOR is the limit; see `against_dense.distances`."""
    worst = {"factor": 0.0}
    for key, truth in exact.items():
        mine = moved[key][tuple(slice(0, size) for size in truth.shape)]
        error, off = ((x.double() - truth).abs().max().item() for x in (mine, dense[key]))
        eps = torch.finfo(torch.float32).eps * truth.abs().max().item()
        factor = error / max(off, eps * FLOOR_EPS / FACTOR)
        if not factor <= worst["factor"]:  # also where it is NaN
            worst = {"factor": factor, "worst": key, "error": error, "dense_error": off}
    return worst


def read_densely(name, folder):
    model = build(name)
    optimizer = adamw(model)
    load(model, optimizer, folder)
    return held(model, optimizer)


def of_architecture(folder, name, grids):
    """The rows of one architecture, a grid each."""
    dense, exact = build(name), build(name).double()
    optimizer, other = adamw(dense), adamw(exact)
    train(dense, optimizer, name, 0, STEPS)
    save(dense, optimizer, folder / "dense")
    train(dense, optimizer, name, STEPS, 2 * STEPS)
    with InDouble():
        train(exact, other, name, 0, 2 * STEPS, dtype=torch.float64)
    before = "dense"
    for grid in grids:
        row = {"architecture": name, "on": grid, "from": before, "failed": []}
        try:
            by_rank = ndtp.testing.run(on_grid, RANKS, args=(folder, name, grid, before))
            differ = same_bits(read_densely(name, folder / "again"), read_densely(name, folder / before))
        except (ndtp.testing.RankError, CheckpointError) as error:
            row["failed"].append(str(error).splitlines()[0])
            print(error, file=sys.stderr)
            yield row
            continue
        row["bits"], row["same_grid"] = not differ, not any(each["differ"] for each in by_rank)
        row["elsewhere"] = furthest(by_rank[0]["moved"], values(dense), values(exact))
        row["failed"] += [f"other bits: {differ[0]} and {len(differ) - 1} more"] if differ else []
        lost = [key for each in by_rank for key in each["differ"]]
        row["failed"] += [f"other bits on the same grid: {lost[0]}"] if lost else []
        if not row["elsewhere"]["factor"] <= FACTOR:
            row["failed"].append(f"{row['elsewhere']['worst']}: {row['elsewhere']['factor']:.3g} times the dense error")
        before = grid
        yield row


def line(row):
    found = (row.get("bits"), row.get("same_grid"), round(row.get("elsewhere", {}).get("factor", float("nan")), 2))
    cells = f"{found[0]!s:>5} {found[1]!s:>9} {found[2]:>9}"
    return f"{row['architecture']:32} {row['from']:22} {row['on']:22} {cells}  {'; '.join(row['failed']) or 'ok'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[""], help="architectures whose names begin with one of these")
    parser.add_argument("--all", action="store_true", help="all seven grids for each")
    parser.add_argument("--json", type=Path, help="the record; other pairs in it are kept")
    arguments = parser.parse_args()
    rows = []
    print(f"{'model':32} {'from':22} {'to':22} {'bits':>5} {'same grid':>9} {'elsewhere':>9}", flush=True)
    for i, name in enumerate(architectures.ALL):
        grids = [*GRIDS, *GRIDS][i % len(GRIDS) :][: len(GRIDS) if arguments.all else 2]
        if not name.startswith(tuple(arguments.only)):
            continue
        folder = Path(tempfile.mkdtemp(prefix="ndtp-checkpoints-"))
        for row in of_architecture(folder, name, grids):
            rows.append(row)
            print(line(row), flush=True)
            if arguments.json is not None:
                write(arguments.json, rows, RANKS)
        shutil.rmtree(folder)
    failed = [row for row in rows if row["failed"]]
    print(f"{len(rows) - len(failed)} of {len(rows)} go from grid to grid")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
