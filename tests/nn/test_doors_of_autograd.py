"""Ways into autograd other than `loss.backward()`: what they give for a dense model, or an error."""

from __future__ import annotations

import pytest
import torch
from nn_case import Case

import ndtp
from ndtp import Grid
from ndtp.testing import assert_equal

GRID = Grid(dp=2, z=2, x=1, y=1)


def twice_differentiated():
    case = Case(GRID, "3d")
    x = case.block.in_layout.shard(case.parts[0][0], case.mesh.rank).clone().requires_grad_()
    for run in (
        lambda y: torch.autograd.grad(y.sum(), x, create_graph=True),
        lambda y: y.sum().backward(create_graph=True),
        lambda y: torch.autograd.grad((y * y).sum(), list(case.block.parameters()), create_graph=True),
    ):
        with pytest.raises(RuntimeError, match=r"up -> .*down.*create_graph"):
            run(case.block(x))
    assert not case.mesh.collectives.in_flight
    case.run(case.parts[0])
    case.check(case.parts[:1], "after a refusal")

    # A relayout is linear: its gradient is one more relayout.
    layout = case.block.in_layout
    y = ndtp.relayout(x * x, layout, layout.with_dims(None, None), case.mesh)
    (grad,) = torch.autograd.grad((y * y * y).sum(), x, create_graph=True)
    (again,) = torch.autograd.grad(grad.sum(), x)
    assert_equal(grad.detach(), 6 * x.detach() ** 5, "gradient")
    assert_equal(again, 30 * x.detach() ** 4, "gradient of a gradient")


def test_a_second_differentiation_is_refused_at_the_first(ranks):
    ranks(4).run(twice_differentiated)


def gradients_beside_accumulation():
    """`torch.autograd.grad` gives the gradients of its own loss, and leaves what is accumulated as it is."""
    case = Case(GRID, "3d")
    mesh, parts = case.mesh, case.parts
    parameters = list(case.block.parameters())
    layouts = [layout for layer in (case.block.up, case.block.down) for layout in (layer.plan.b, layer.plan.bias)]

    def grad(part, wanted=parameters):
        return torch.autograd.grad(case.loss(part), wanted)

    def check_own(gradients, part, what):
        for gradient, layout, dense in zip(gradients, layouts, case.expected([part]), strict=True):
            assert_equal(gradient.to_local(), layout.shard(dense, mesh.rank), what)
        assert all(parameter.grad is None for parameter in parameters), what

    with mesh.accumulate():
        check_own(grad(parts[0]), parts[0], "inside, with nothing accumulated")
        case.run(parts[1])
        check_own(grad(parts[0]), parts[0], "inside")
    check_own(grad(parts[0]), parts[0], "outside, with a sum that waits")
    grad(parts[0], parameters[:1])
    case.loss(parts[0]).backward(inputs=parameters[:2])  # takes up the sums of these, finishes those of the others
    for i, (parameter, layout) in enumerate(zip(parameters, layouts, strict=True)):
        expected = case.expected(parts[:2] if i < 2 else parts[1:2])[i]
        assert_equal(parameter.grad.to_local(), layout.shard(expected, mesh.rank), f"parameter {i}")
    case.block.zero_grad()
    assert not mesh.collectives.in_flight
    case.run(parts[2])
    case.check(parts[2:], "the step after it")


def test_autograd_grad_neither_loses_nor_leaks_accumulated_gradients(ranks):
    ranks(4).run(gradients_beside_accumulation)


def hooks():
    """Hooks of a weight see finished gradients, whoever finishes them."""
    case = Case(GRID, "3d")
    mesh, parts, seen = case.mesh, case.parts, []
    weight, bias = case.block.down.weight, case.block.up.bias
    handles = [
        weight.register_hook(lambda grad: seen.append(("tensor", grad.to_local().clone()))),
        weight.register_hook(lambda grad: 2 * grad),
        bias.register_post_accumulate_grad_hook(lambda p: seen.append(("post-accumulate", p.grad.to_local().clone()))),
    ]

    def check(parts, what):
        _, up_bias, down_weight, _ = case.expected(parts)
        down_weight = case.block.down.plan.b.shard(down_weight, mesh.rank)
        expected = {
            "tensor": down_weight,
            "post-accumulate": case.block.up.plan.bias.shard(up_bias, mesh.rank),
        }
        assert sorted(name for name, _ in seen) == sorted(expected), f"{what}: {[name for name, _ in seen]}"
        for name, gradient in seen:
            assert_equal(gradient, expected[name], f"{what}, {name} hook")
        assert_equal(weight.grad.to_local(), 2 * down_weight, what)
        seen.clear(), case.block.zero_grad()

    case.run(parts[0])
    check(parts[:1], "plain")
    with mesh.accumulate():
        case.run(parts[0]), case.run(parts[1])
    assert not seen, "no gradient is there yet"
    mesh.reduce_gradients()
    check(parts[:2], "reduce_gradients")
    with mesh.accumulate():
        case.run(parts[0])
    case.run(parts[1])
    check(parts[:2], "the backward that follows")
    with mesh.accumulate():
        case.run(parts[0])
    x = case.block.in_layout.shard(parts[1][0], mesh.rank)
    (0 * case.block.up(x)).sum().backward()  # comes to a part of the weights; the others are finished at its end
    check(parts[:1], "the end of a backward")
    for handle in handles:
        handle.remove()
    assert not weight._backward_hooks and not bias._backward_hooks, "a moved DTensor that has hooks takes no others"
    case.block.float().double()  # moves the parameters, and their empty dictionaries of hooks
    handle = case.block.down.weight.register_post_accumulate_grad_hook(lambda p: seen.append("moved"))
    with mesh.accumulate():
        case.run(parts[0])
    mesh.reduce_gradients()
    handle.remove(), case.block.zero_grad()
    assert seen == ["moved"]


def test_hooks_of_weights_see_finished_gradients(ranks):
    ranks(4).run(hooks)


def compiled_while_accumulating():
    import torch._dynamo

    torch.compiler.config.force_disable_caches = True
    case = Case(Grid(z=2, x=1, y=1), "3d")
    eager = case.block
    compiled = torch.compile(eager.forward, backend="aot_eager", fullgraph=True)

    def run(function, part):
        x, grad = part
        y = function(eager.in_layout.shard(x, case.mesh.rank))
        y.backward(eager.out_layout.shard(grad, case.mesh.rank))

    with case.mesh.accumulate():
        run(compiled, case.parts[0])
        run(compiled, case.parts[1])
    run(compiled, case.parts[2])
    case.check(case.parts, "compiled, inside and outside")

    with case.mesh.accumulate():
        run(eager, case.parts[0])
        run(compiled, case.parts[1])
    run(compiled, case.parts[2])
    case.check(case.parts, "eager inside, compiled at the end")

    with case.mesh.accumulate():
        run(compiled, case.parts[0])
    run(eager, case.parts[1])
    case.check(case.parts[:2], "compiled inside, eager at the end")
    torch._dynamo.reset()


def test_compiled_code_reduces_its_gradients_while_others_are_accumulated(ranks):
    ranks(2).run(compiled_while_accumulating)


def watched_for_nan():
    """Placeholders of gradients on their way are numbers."""
    case = Case(GRID, "3d")
    plan = case.block.up.plan
    weight = plan.b.shard(case.dense[0].weight.detach(), case.mesh.rank).clone().requires_grad_()
    x = plan.a.shard(case.parts[0][0], case.mesh.rank)
    with torch.autograd.detect_anomaly(check_nan=True):
        ndtp.matmul(x, weight, plan, case.mesh).sum().backward()


def test_anomaly_mode_finds_none(ranks):
    ranks(4).run(watched_for_nan)
