"""Loss curves of an eight-layer model whose tensors travel in few bytes: fp32, bf16, fp8 and int8, several seeds.

    python bench/wire_curves.py --check                                       # four ranks against what is computed here
    python bench/wire_curves.py --gradients --out bench/results/wire_curves.json   # errors of the first gradients
    nice -n 19 python bench/wire_curves.py --out bench/results/wire_curves.json    # one process, about an hour

Four ranks of z=2 y=2 would wait for each other thousands of times on a shared machine.  So one process computes what
they compute: each gather, and each part of a sum, is quantised by ndtp's own codecs where a rank would send it, and
parts are added up in fp32 in the order of the ranks.  `--check` trains the same model on four real ranks with the same
wire, and compares losses and gradients of the first steps.

The final loss is the mean of the last 100 of all steps; each seed has the same weights and batches in every dtype.
`control` is fp32 in which the learning rate is larger by a part in a million: how far runs drift apart by themselves.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import ndtp
import ndtp.testing
from ndtp.algebra.wire import RECIPES, Wire
from ndtp.collectives.codecs import CODECS
from ndtp.models.byte_model import ByteModel, ByteModelSizes

Z = Y = 2
SIZES = ByteModelSizes(width=64, inner=256, layers=8, heads=8)
BATCH, CONTEXT, RATE, WARM, LAST = 8, 32, 1e-3, 20, 100
WIRES: dict[str, str | None] = {
    "fp32": None,
    "bf16": "bf16",
    "fp8 weights and activations, bf16 gradients": "weights=fp8,activations=fp8,gradients=bf16",
    "fp8": "fp8",
    "int8": "int8",
    "control": None,
}
ALLOWED = {"bf16": 2e-3, "fp8 weights and activations, bf16 gradients": 1e-2, "fp8": 1e-2, "int8": 1e-2}


def sent(x: Tensor, wire: Wire | None, kind: str, parts: int = 1) -> Tensor:
    """The numbers that arrive of `x`, of which each of so many parts of the last dim is a row of its own."""
    form = None if wire is None else wire.format(kind)
    cut = x.unflatten(-1, (parts, -1)) if parts > 1 else x
    if form is None or not form.saves(cut.shape, 4):
        return x
    codec, cut = CODECS[form.name], cut.contiguous()
    memory = torch.empty(codec.num_bytes(tuple(cut.shape)), dtype=torch.uint8)
    codec.encode(cut, memory)
    return codec.decode(memory, tuple(cut.shape), x.dtype).view(x.shape)


def summed(parts: list[Tensor], wire: Wire | None, kind: str, pieces: int = 1) -> Tensor:
    """The sum of parts that travel to who adds them up."""
    first, *others = (sent(part, wire, kind, pieces) for part in parts)
    for other in others:
        first = first + other
    return first


def everywhere(parts: list[Tensor], wire: Wire | None, kind: str) -> Tensor:
    """The sum of parts on all ranks: it travels, too."""
    return sent(summed(parts, wire, kind), wire, kind)


class First(torch.autograd.Function):
    """A[M_zy, K] . B[N_y, K_z] -> C[M_z, N_y]; `blocks` are sizes of N that y splits one by one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, blocks: tuple[int, ...], wire: Wire | None) -> Tensor:
        a, weight = sent(x, wire, "activations"), sent(w, wire, "weights", Z)
        ctx.save_for_backward(a, weight)
        ctx.blocks, ctx.wire, ctx.has_bias = blocks, wire, b is not None
        return a @ weight.T if b is None else torch.addmm(b, a, weight.T)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (a, weight), wire = ctx.saved_tensors, ctx.wire
        grads, weights = grad.split(ctx.blocks, 1), weight.split(ctx.blocks)
        dx = [sum(g.chunk(Y, 1)[y] @ v.chunk(Y)[y] for g, v in zip(grads, weights, strict=True)) for y in range(Y)]
        rows = list(zip(grad.chunk(Z), a.chunk(Z), strict=True))
        dw = summed([g.T @ part for g, part in rows], wire, "weight_gradients", Z)
        db = everywhere([g.sum(0) for g, _ in rows], wire, "weight_gradients") if ctx.has_bias else None
        return summed(dx, wire, "activation_gradients"), dw, db, None, None


class Second(torch.autograd.Function):
    """A[M_z, K_y] . B[N, K_yz] -> C[M_zy, N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, wire: Wire | None) -> Tensor:
        weight = sent(w, wire, "weights", Y * Z)
        ctx.save_for_backward(x, weight)
        ctx.wire, ctx.has_bias = wire, b is not None
        parts = [a @ v.T for a, v in zip(x.chunk(Y, 1), weight.chunk(Y, 1), strict=True)]
        y = summed(parts, wire, "activations")
        return y if b is None else y + b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (x, weight), wire = ctx.saved_tensors, ctx.wire
        grad = sent(grad, wire, "activation_gradients")
        rows = list(zip(grad.chunk(Z), x.chunk(Z), strict=True))
        dw = summed([g.T @ part for g, part in rows], wire, "weight_gradients", Y * Z)
        db = everywhere([g.sum(0) for g, _ in rows], wire, "weight_gradients") if ctx.has_bias else None
        return grad @ weight, dw, db, None


class Rows(torch.autograd.Function):
    """Rows of an embedding, and their gradient, on their way: each rank has a part of their features."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wire: Wire | None) -> Tensor:
        ctx.wire = wire
        return sent(x, wire, "activations", Z * Y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return sent(grad, ctx.wire, "activation_gradients", Z * Y), None


class Wired(nn.Module):
    """A `ByteModel` on one rank that computes what four compute."""

    def __init__(self, model: ByteModel, wire: Wire | None) -> None:
        super().__init__()
        self.model, self.wire = model, wire
        for layer in model.layers:
            layer.attention = _Attention(layer.attention, wire)
            layer.mlp = _MLP(layer.mlp, wire)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        model = self.model
        h = Rows.apply(model.embedding(ids.flatten()), self.wire)
        for layer in model.layers:
            h = layer(h, ids.shape[1])
        weight = model.head.weight
        logits = First.apply(model.norm(h), weight, None, (len(weight),), self.wire)
        return nn.functional.cross_entropy(logits, targets.flatten())


class _Given(nn.Module):
    """Hands out what was multiplied before."""

    value: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.value


class _Attention(nn.Module):
    """A `DenseAttention` whose projections are the products of four ranks."""

    def __init__(self, dense: Any, wire: Wire | None) -> None:
        super().__init__()
        self.core, self.wire, names = dense, wire, ("q_proj", "k_proj", "v_proj", "o_proj")
        self.projections = nn.ModuleDict({name: getattr(dense, name) for name in names})
        for name in names[:3]:
            setattr(dense, name, _Given())
        dense.o_proj = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, o = self.projections.values()
        weight = torch.cat([p.weight for p in (q, k, v)])
        blocks = tuple(p.out_features for p in (q, k, v))
        made = First.apply(x.flatten(0, 1), weight, None, blocks, self.wire)
        self.core.q_proj.value, self.core.k_proj.value, self.core.v_proj.value = made.split(blocks, 1)
        return Second.apply(self.core(x).flatten(0, 1), o.weight, o.bias, self.wire).view(x.shape)


class _MLP(nn.Module):
    def __init__(self, dense: Any, wire: Wire | None) -> None:
        super().__init__()
        self.up, self.down, self.wire = dense.up, dense.down, wire

    def forward(self, x: Tensor) -> Tensor:
        up, down = self.up, self.down
        h = nn.functional.gelu(First.apply(x, up.weight, up.bias, (up.out_features,), self.wire))
        return Second.apply(h, down.weight, down.bias, self.wire)


def batch_of(text: Tensor, seed: int, step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=draw)
    rows = text[starts + torch.arange(CONTEXT + 1)].long()
    return rows[:, :-1], rows[:, 1:]


def text_of() -> Tensor:
    return torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8)


def dense_of(seed: int, sizes: ByteModelSizes = SIZES) -> ByteModel:
    torch.manual_seed(seed)
    return ByteModel(sizes)


def losses_of(name: str, seed: int, steps: int) -> list[float]:
    model, text = Wired(dense_of(seed), Wire.of(WIRES[name])), text_of()
    rate = RATE * (1 + 1e-6 * (name == "control"))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=rate), []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min((step + 1) / WARM, 1.0)
        loss = model(*batch_of(text, seed, step))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def on_ranks(wire: str | None, layers: int) -> list[tuple[float, float]]:
    """Of the first steps on four ranks: how far the loss is from what is computed here, and the gradients."""
    sizes = ByteModelSizes(SIZES.width, SIZES.inner, layers, SIZES.heads)
    here, text, found = Wired(dense_of(0, sizes), Wire.of(wire)), text_of(), []
    mesh = ndtp.ProcessGrid(ndtp.Grid(z=Z, x=1, y=Y), wire=wire)
    model = dense_of(0, sizes).to_grid(mesh, "3d", 1)
    pairs = [(model, torch.optim.SGD(model.parameters(), lr=0.1)), (here, torch.optim.SGD(here.parameters(), lr=0.1))]
    by_name = {name.replace("projections.", "").removeprefix("model."): p for name, p in here.named_parameters()}
    for step in range(3):
        losses = [each(*batch_of(text, 0, step)) for each, _ in pairs]
        for loss, (_, optimizer) in zip(losses, pairs, strict=True):
            optimizer.zero_grad()
            loss.backward()
        mine, theirs = (
            torch.cat([grad.flatten() for grad in grads])
            for grads in (
                [p.grad.full_tensor() for p in model.parameters()],
                [by_name[name].grad for name, _ in model.named_parameters()],
            )
        )
        apart = float((mine - theirs).norm() / theirs.norm())
        found.append((abs(float(losses[0].detach() / losses[1].detach()) - 1), apart))
        for _, optimizer in pairs:
            optimizer.step()
    return found


def of_recipe(recipe: str, sizes: dict[str, int]) -> Tensor:
    """Return the first gradients by a recipe on real ranks, or on one."""
    mesh = ndtp.ProcessGrid(ndtp.Grid(sizes), recipe=recipe)
    model = dense_of(0).to_grid(mesh, "3d", 1)
    ids, targets = (torch.cat(each) for each in zip(batch_of(text_of(), 0, 0), batch_of(text_of(), 0, 1), strict=True))
    model(ids, targets).backward()
    grads = (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters())
    return torch.cat([grad.flatten().double() for grad in grads])


def gradients() -> dict[str, dict[str, tuple[float, float]]]:
    """The first gradients of the model against fp64: relative norm of the error, and 1 - cosine; two batches.

    Of four ranks, and of one that rounds every operand in the same way; and of a dense model that computes in bf16.
    """
    global Z, Y  # noqa: PLW0603
    text, found = text_of(), dict[str, dict[str, tuple[float, float]]]()
    ids, targets = (torch.cat(each) for each in zip(batch_of(text, 0, 0), batch_of(text, 0, 1), strict=True))

    def vector(model: nn.Module) -> Tensor:
        model(ids, targets).backward()
        by_name = {n.replace("projections.", "").removeprefix("model."): p.grad for n, p in model.named_parameters()}
        return torch.cat([by_name[name].flatten().double() for name, _ in dense_of(0).named_parameters()])

    exact = vector(dense_of(0).double())

    def apart(mine: Tensor) -> tuple[float, float]:
        cosine = float(mine @ exact / (mine.norm() * exact.norm()))
        return float((mine - exact).norm() / exact.norm()), 1 - cosine

    found["computed in bf16"] = {"dense": apart(vector(dense_of(0).bfloat16()))}
    for name, wire in WIRES.items():
        if name == "control":
            continue
        rows = {}
        for place, parts in (("dense", 1), ("four ranks", 2)):
            Z = Y = parts
            rows[place] = apart(vector(Wired(dense_of(0), Wire.of(wire))))
        found[name] = rows
    for recipe in RECIPES:
        grids = {"dense": {"z": 1, "x": 1, "y": 1}, "four ranks": {"z": 2, "x": 1, "y": 2}}
        found[f"recipe {recipe}"] = {
            place: apart(ndtp.testing.run(of_recipe, ndtp.Grid(sizes).num_ranks, args=(recipe, sizes))[0])
            for place, sizes in grids.items()
        }
    return found


def check(layers: int) -> None:
    for name, wire in WIRES.items():
        if name != "control":
            found = ndtp.testing.run(on_ranks, ranks=Z * Y, args=(wire, layers))[0]
            said = "; ".join(f"loss {loss:.1e}, gradients {gradient:.1e}" for loss, gradient in found)
            print(f"{name}: apart, relative, by step: {said}", flush=True)
            # A number that is rounded the other way is off by a place of its dtype: rare, and it grows by steps.
            assert found[0][0] < 1e-5 and found[0][1] < 1e-3, f"{name}: four ranks compute something else"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=list(WIRES), choices=list(WIRES))
    parser.add_argument("--check", action="store_true", help="compare with four real ranks, and end")
    parser.add_argument("--gradients", action="store_true", help="compare gradients of one step, and end")
    parser.add_argument("--layers", type=int, default=2, help="of --check")
    parser.add_argument("--out", type=Path, help="JSON; runs that it has are not made again")
    arguments = parser.parse_args()
    if arguments.check:
        check(arguments.layers)
        return
    torch.set_num_threads(1)
    if arguments.gradients:
        rows = gradients()
        for name, each in rows.items():
            print(name, *(f"{place}: {norm:.2e}, 1 - cosine {c:.1e};" for place, (norm, c) in each.items()))
        if arguments.out is not None:
            kept = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"final": {}}
            arguments.out.write_text(json.dumps(kept | {"gradients": rows}, indent=1) + "\n")
        return
    path: Path | None = arguments.out
    kept = json.loads(path.read_text()) if path is not None and path.exists() else {"final": {}}
    final: dict[str, dict[str, float]] = kept["final"]
    curves: dict[str, dict[str, list[float]]] = kept.get("every 50th loss", {})
    for seed in range(arguments.seeds):
        for name in arguments.only:
            if str(seed) in final.get(name, {}):
                continue
            began, losses = time.process_time(), losses_of(name, seed, arguments.steps)
            final.setdefault(name, {})[str(seed)] = sum(losses[-LAST:]) / len(losses[-LAST:])
            curves.setdefault(name, {})[str(seed)] = [round(loss, 4) for loss in losses[::50]]
            apart = final[name][str(seed)] / final["fp32"][str(seed)] - 1 if "fp32" in final else float("nan")
            took = time.process_time() - began
            print(f"seed {seed}, {name}: {final[name][str(seed)]:.5f}, {apart:+.3%}, {took:.0f} s", flush=True)
            if path is not None:
                said = kept | record(arguments.steps, final, curves)
                path.write_text(json.dumps(said, indent=1) + "\n")


def record(steps: int, final: dict[str, Any], curves: dict[str, Any]) -> dict[str, Any]:
    against = {
        name: {seed: loss / final["fp32"][seed] - 1 for seed, loss in each.items() if seed in final["fp32"]}
        for name, each in final.items()
        if name != "fp32"
    }
    return {
        "date": str(date.today()), "torch": torch.__version__, "steps": steps, "grid": f"z={Z} y={Y}, on one rank",
        "model": f"{SIZES.layers} layers, width {SIZES.width}, {BATCH} sequences of {CONTEXT} bytes, AdamW {RATE}",
        "final loss": f"mean of the last {LAST} steps", "allowed": ALLOWED, "final": final,
        "relative to fp32": against,
        "mean over seeds": {name: sum(each.values()) / len(each) for name, each in against.items() if each},
        "every 50th loss": curves,
    }  # fmt: skip


if __name__ == "__main__":
    main()
