"""Torch's own samples of its operations, on tensors of a grid that lie in any way, compared with dense ones.

    pip install expecttest
    python tests/runtime/every_operation.py --json bench/results/grid_operations.json

An operation gives what it gives of dense tensors, or it is refused by name.  It takes ten minutes; `--seed` draws other
layouts, `--in-place` takes the forms that write into their first operand, `--gradients` takes parameters that have
padding as well, and compares their gradients, too, `--activations` takes split activations in their place, and
`--refusals` takes operands that torch refuses.  Tensors
whose numbers are not defined (`empty`), sparse ones, and attention that drops at random are not compared.
"""

from __future__ import annotations

import argparse
import json
import random
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_leaves, tree_map

import ndtp
import ndtp.testing
from ndtp.runtime.grid_autograd import PutInPlace
from ndtp.runtime.grid_parts import full_of
from ndtp.runtime.grid_tensor import GridTensor
from ndtp.split import Context, SplitTensor, cut, enter, spec_of, whole

AT_ONCE, SAMPLES = 6, 6  # operations in one call of the ranks, samples of each
UNDEFINED = (
    "empty", "sparse", "normal", "rand", "uniform", "bernoulli", "multinomial", "dropout", "exponential", "geometric",
    "cauchy", "rrelu",
)  # fmt: skip

# Samples of these drop at random, where split activations draw numbers of their own.
DROPS = ("scaled_dot_product_attention", "multi_head_attention_forward")


def operations() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if torch.float32 in op.dtypes and not any(word in op.name for word in UNDEFINED)]


def on_grid(x: Any, mesh: Any, draw: random.Random) -> Any:
    """A tensor of a grid whose dims are split over axes that divide them."""
    if not isinstance(x, Tensor) or x.dim() == 0 or x.layout is not torch.strided:
        return x
    sizes, placements = list(x.shape), []
    for count in mesh.shape:
        dim = draw.choice([None, *(d for d, size in enumerate(sizes) if size and size % count == 0)])
        placements.append(Replicate() if dim is None else Shard(dim))
        if dim is not None:
            sizes[dim] //= count
    return GridTensor(distribute_tensor(x.detach().clone(), mesh, placements))


def padded_on_grid(x: Any, mesh: Any, draw: random.Random) -> Any:
    """A tensor of a grid of which the axes split any dims, with padding where they do not divide them."""
    if not isinstance(x, Tensor) or x.dim() == 0 or x.layout is not torch.strided or not x.numel():
        return x
    counts, placements = [1] * x.dim(), []
    for count in mesh.shape:
        dim = draw.choice([None, *range(x.dim())])
        placements.append(Replicate() if dim is None else Shard(dim))
        if dim is not None:
            counts[dim] *= count
    shape = torch.Size(-(-size // count) * count for size, count in zip(x.shape, counts, strict=True))
    return PutInPlace.apply(x.detach().clone(), placements, mesh, shape, GridTensor)


def in_parts(x: Any, context: Context, draw: random.Random) -> Any:
    """A split activation, whose gradient is that of the whole tensor."""
    if not isinstance(x, Tensor) or x.layout is not torch.strided or all(size < 2 for size in x.shape):
        return x
    dims: list[tuple[str, ...]] = [()] * x.dim()
    for axis in ("x", "y"):
        dim = draw.choice([None, *(d for d, size in enumerate(x.shape) if size > 1 and not dims[d])])
        if dim is not None:
            dims[dim] = (axis,)
    spec = spec_of(context, tuple(x.shape), tuple(dims))
    return enter(cut(x, spec), spec)


def gradient_of(result: Any, x: Tensor) -> Tensor | None:
    """The gradient of a fixed combination of all that an operation gives, with respect to one operand."""
    generator, total = torch.Generator().manual_seed(0), torch.zeros(())
    for each in tree_leaves(result):
        if isinstance(each, Tensor) and each.requires_grad and not each.is_complex():
            each = whole(each) if isinstance(each, SplitTensor) else each
            each = each.full_tensor() if isinstance(each, DTensor) else each
            total = total + (each * torch.randn(each.shape, generator=generator)).sum()
    return torch.autograd.grad(total, x, allow_unused=True)[0] if total.requires_grad else None


def is_same(ours: Any, theirs: Any) -> bool:
    ours, theirs = tree_leaves(ours), tree_leaves(theirs)
    if len(ours) != len(theirs):
        return False
    for x, y in zip(ours, theirs, strict=True):
        x = full_of(x) if isinstance(x, DTensor) else whole(x) if isinstance(x, SplitTensor) else x
        try:
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4, equal_nan=True, check_stride=False)
        except (AssertionError, TypeError):
            return False
    return True


def count(op: Any, lies: Any, found: Counter[str], odd: list[str], is_equal: Callable[[], bool]) -> None:
    """Count a sample as equal, wrong, refused or an error, and note what is odd of tensors that lie so."""
    try:
        result = "equal" if is_equal() else "wrong"
    except ndtp.LayoutError:
        result = "refused"
    except Exception as error:
        result = f"{type(error).__name__}: {error}".splitlines()[0][:80]
    found[result if result in ("equal", "wrong", "refused") else "error"] += 1
    if result not in ("equal", "refused"):
        odd.append(f"{op.name} {op.variant_test_name}: {result}, of {lies}")


def laid_out(given: Any, mesh: Any, draw: random.Random) -> Any:
    """The operands of a sample, or their first alone, on the grid."""
    one = given[0] if draw.random() < 0.5 else None
    return tree_map(lambda x: on_grid(x, mesh, draw) if one is None or x is one else x, given)


def compare(first: int, in_place: bool, seed: int) -> tuple[dict[str, int], list[str]]:
    """Return how many samples of a few operations were equal, refused or else, and which were else."""
    warnings.simplefilter("ignore")
    mesh, draw = ndtp.ProcessGrid(ndtp.Grid(x=2, y=2)).device_mesh, random.Random(seed)
    found, odd = Counter[str](), list[str]()
    copied = lambda part: tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, part)  # noqa: E731
    for op in operations()[first : first + AT_ONCE]:
        run = op.inplace_variant if in_place else op.op
        if run is None:
            continue
        for sample in list(op.sample_inputs(torch.get_default_device().type, torch.float32))[:SAMPLES]:
            given = (sample.input, sample.args, sample.kwargs)
            with torch.no_grad():
                try:
                    x, args, kwargs = copied(given)
                    expected = run(x, *args, **kwargs)
                except Exception:
                    continue
                own = laid_out(given, mesh, draw)
                x, args, kwargs = tree_map(lambda x: x.clone() if type(x) is Tensor else x, own)
                if not any(isinstance(each, GridTensor) for each in tree_leaves(own)):
                    continue
                lies = [each.placements for each in tree_leaves(own) if isinstance(each, GridTensor)]
                count(op, lies, found, odd, lambda: is_same(run(x, *args, **kwargs), expected))  # noqa: B023
    return dict(found), odd


def differentiable(sample: Any) -> tuple[Any, Any, Any]:
    """The operands of a sample, of which the first takes a gradient where it can."""
    given = tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, (sample.input, sample.args))
    if isinstance(given[0], Tensor) and given[0].is_floating_point():
        given[0].requires_grad_()
    return (*given, sample.kwargs)


def compare_gradients(
    laid: Callable[[Any, Any, random.Random], tuple[Any, Any, Any]], first: int, in_place: bool, seed: int
) -> tuple[dict[str, int], list[str]]:
    """The same with gradients by the first operand.

    Args:
        laid: gives of a sample the operand that takes a gradient, the first one and the others as they are called.
    """
    warnings.simplefilter("ignore")
    mesh, draw = ndtp.ProcessGrid(ndtp.Grid(x=2, y=2)), random.Random(seed)
    found, odd = Counter[str](), list[str]()
    for op in operations()[first : first + AT_ONCE]:
        run = op.inplace_variant if in_place else op.op
        if run is None or op.name.endswith(DROPS):
            continue
        samples = list(op.sample_inputs(torch.get_default_device().type, torch.float32))
        for sample in draw.sample(samples, min(SAMPLES, len(samples))):
            x, args, kwargs = differentiable(sample)
            try:
                expected = run(x * 1 if in_place else x, *args, **kwargs)
                slope = gradient_of(expected, x) if isinstance(x, Tensor) and x.requires_grad else None
            except Exception:
                continue
            own, split, others = laid(sample, mesh, draw)
            leaves = [each for each in tree_leaves(split) if isinstance(each, (SplitTensor, GridTensor))]
            if not leaves:
                continue
            lies = [each.spec.dims if isinstance(each, SplitTensor) else each.placements for each in leaves]

            def is_equal() -> bool:
                given = run(split * 1 if in_place else split, *others, **kwargs)  # noqa: B023
                return is_same(given, expected) and (slope is None or is_same(gradient_of(given, own), slope))  # noqa: B023

            count(op, lies, found, odd, is_equal)
    return dict(found), odd


def as_parameters(sample: Any, mesh: Any, draw: random.Random) -> tuple[Any, Any, Any]:
    """Tensors of a grid, with padding where axes do not divide them: the first operand, in half of all cases all."""
    x, args, _ = differentiable(sample)
    with torch.no_grad():
        on = lambda part: tree_map(lambda x: padded_on_grid(x, mesh.device_mesh, draw), part)  # noqa: E731
        own, others = on(x), args if draw.random() < 0.5 else on(args)
    if isinstance(own, Tensor) and x.requires_grad:
        own.requires_grad_()
    return own, own, others


def as_activations(sample: Any, mesh: Any, draw: random.Random) -> tuple[Any, Any, Any]:
    """Split activations in the place of the first operand."""
    own, args, _ = differentiable(sample)
    context = Context(mesh)
    return own, tree_map(lambda x: in_parts(x * 1, context, draw) if isinstance(x, Tensor) else x, own), args


def compare_refusals(first: int, in_place: bool, seed: int) -> tuple[dict[str, int], list[str]]:
    """Operands that torch refuses: a split activation is refused with them, too."""
    warnings.simplefilter("ignore")
    mesh, draw = ndtp.ProcessGrid(ndtp.Grid(x=2, y=2)), random.Random(seed)
    found, odd = Counter[str](), list[str]()
    for op in operations()[first : first + AT_ONCE]:
        for sample in op.error_inputs("cpu") if op.error_inputs_func is not None else ():
            given, context = sample.sample_input, Context(mesh)
            if given.kwargs.get("out") is not None:  # memory that overlaps with that of an operand
                continue
            try:
                op(given.input, *given.args, **given.kwargs)
                continue
            except Exception as error:
                why = f"{type(error).__name__}: {error}".splitlines()[0][:80]
            split = tree_map(
                lambda x, c=context: in_parts(x, c, draw) if isinstance(x, Tensor) and x.is_floating_point() else x,
                given.input,
            )
            if not any(isinstance(each, SplitTensor) for each in tree_leaves(split)):
                continue
            try:
                op(split, *given.args, **given.kwargs)
                found["taken"] += 1
                odd.append(f"{op.name} {op.variant_test_name}: taken, where dense raises {why}")
            except Exception:
                found["refused"] += 1
    return dict(found), odd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--in-place", action="store_true")
    parser.add_argument("--gradients", action="store_true")
    parser.add_argument("--activations", action="store_true")
    parser.add_argument("--refusals", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    total, odd, number = Counter[str](), list[str](), len(operations())
    kinds: dict[str, Any] = {
        "gradients": partial(compare_gradients, as_parameters),
        "activations": partial(compare_gradients, as_activations),
        "refusals": compare_refusals,
    }
    compared = next((run for name, run in kinds.items() if getattr(options, name)), compare)
    for first in range(0, number, AT_ONCE):
        found, more = ndtp.testing.run(compared, ranks=4, args=(first, options.in_place, options.seed), timeout=120)[0]
        total.update(found)
        odd += more
        print(*more, sep="\n", end="\n" if more else "", flush=True)
    print(f"{number} operations: {dict(total)}")
    if options.json:
        record = {"torch": torch.__version__, "seed": options.seed, "in_place": options.in_place, "operations": number}
        options.json.write_text(json.dumps(record | {"samples": dict(total), "odd": odd}, indent=1) + "\n")


if __name__ == "__main__":
    main()
