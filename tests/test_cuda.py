"""On a GPU: several ranks on one device over gloo, NCCL on one rank, and on as many as there are devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import ndtp
from ndtp import Grid, GridError, Layout, MatMulPlan, ProcessGrid
from ndtp.algebra.steps import Step
from ndtp.collectives import nccl
from ndtp.collectives.buffer_ring import SMALLEST, BufferRing
from ndtp.testing import assert_equal, small_integers
from ndtp.testing.device import share_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; there is none"),
]
BOUNDS = {"low": -1, "high": 1}  # sums of these stay exact in fp32


def matmul_equals_dense(mesh, device, chunks):
    plan = MatMulPlan(Layout.parse(mesh.grid, "(z y) x"), Layout.parse(mesh.grid, "(x z) y"), chunks=chunks)
    whole = [small_integers(shape, seed, **BOUNDS) for seed, shape in enumerate([(512, 256), (256, 384), (512, 384)])]
    layouts = (plan.a, plan.b, plan.out)
    a, b, grad = (layout.shard(x, mesh.rank).to(device) for layout, x in zip(layouts, whole, strict=True))
    for _ in range(2):  # the second time out of used buffers
        a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
        c = ndtp.matmul(a, b, plan, mesh)
        c.backward(grad)
        assert c.device.type == device.type
        assert_equal(c, plan.out.shard(whole[0] @ whole[1], mesh.rank), f"C in {chunks} chunks")
        assert_equal(a.grad, plan.a.shard(whole[2] @ whole[1].mT, mesh.rank), f"dA in {chunks} chunks")
        assert_equal(b.grad, plan.b.shard(whole[0].mT @ whole[2], mesh.rank), f"dB in {chunks} chunks")
    assert not mesh.collectives.in_flight and not mesh.ring.lent_bytes


def dense_block(hidden, inner):
    dense = nn.Sequential(nn.Linear(hidden, inner), nn.ReLU(), nn.Linear(inner, hidden))
    for i, parameter in enumerate(dense.parameters()):
        parameter.data = small_integers(parameter.shape, i, **BOUNDS)
    return dense


def mlp_equals_dense(mesh, device, chunks):
    tokens, hidden, inner = 512, 64, 128
    dense = dense_block(hidden, inner)
    mlp = ndtp.nn.MLP.from_dense(dense[0], dense[2], "relu", mesh=mesh, device=device, chunks=chunks)
    x = small_integers((tokens, hidden), 7, **BOUNDS).requires_grad_()
    grad = small_integers((tokens, hidden), 8, **BOUNDS)
    expected = dense(x)
    expected.backward(grad)
    x_shard = mlp.in_layout.shard(x.detach(), mesh.rank).to(device).requires_grad_()
    y = mlp(x_shard)
    y.backward(mlp.out_layout.shard(grad, mesh.rank).to(device))
    assert_equal(y, mlp.out_layout.shard(expected, mesh.rank), f"y in {chunks} chunks")
    assert_equal(x_shard.grad, mlp.in_layout.shard(x.grad, mesh.rank), f"dx in {chunks} chunks")
    for mine, theirs in ((mlp.up, dense[0]), (mlp.down, dense[2])):
        for name, layout in (("weight", mine.plan.b), ("bias", mine.plan.bias)):
            ours = getattr(mine, name).grad
            wanted = layout.shard(getattr(theirs, name).grad, mesh.rank)
            assert_equal(getattr(ours, "_local_tensor", ours), wanted, f"{mine.name}.{name} in {chunks} chunks")


def block_on_gloo(device_type, chunks):
    if device_type == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    mesh = ProcessGrid(Grid(z=2, x=2, y=2), device_type=device_type)
    assert mesh.backend == "gloo" and mesh.device_mesh.device_type == device_type
    matmul_equals_dense(mesh, torch.device(device_type), chunks)
    mlp_equals_dense(mesh, torch.device(device_type), chunks)


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_eight_ranks_over_gloo_equal_dense(ranks, chunks):
    ranks(8).run(block_on_gloo, "cuda", chunks)


def test_a_stream_that_borrows_waits_for_the_work_of_the_one_that_gave_back():
    ring, like = BufferRing(), torch.empty(0, device="cuda")
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(one):
        x = ring.borrow((SMALLEST,), like)
        torch.cuda._sleep(200_000_000)  # a tenth of a second
        x.fill_(1)
        ring.give_back([x])
    with torch.cuda.stream(other):
        y = ring.borrow((SMALLEST,), like)
        assert y.data_ptr() == x.data_ptr()
        y.fill_(2)
    torch.cuda.synchronize()
    assert_equal(y, torch.full((SMALLEST,), 2.0), "written last")


def test_a_captured_graph_borrows_nothing():
    ring, like = BufferRing(), torch.zeros(SMALLEST, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        borrowed = ring.borrow((SMALLEST,), like)
        assert not ring.lent_bytes
        borrowed.copy_(like)
        ring.give_back([borrowed])
    assert not ring.waiting_bytes


def captured(step, warm_up=3):
    """A graph of `step`, and what it returns."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warm_up):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()
    return graph, result


@pytest.mark.parametrize("gemm", ["torch", "kernels"])
def test_a_step_of_one_rank_is_captured(gemm):
    mesh = ProcessGrid(Grid(x=1, y=1, z=1), device_type="cuda", gemm=gemm)
    dense = dense_block(64, 128).cuda()
    mlp = ndtp.nn.MLP.from_dense(dense[0], dense[2], "relu", mesh=mesh, chunks=2)
    x, grad = torch.zeros(256, 64, device="cuda", requires_grad=True), torch.ones(256, 64, device="cuda")

    def step():
        y = mlp(x)
        return y, *torch.autograd.grad(y, [x, *mlp.parameters()], grad)

    graph, results = captured(step)
    with torch.no_grad():
        x.copy_(small_integers(x.shape, 3, **BOUNDS))
    graph.replay()
    y = dense(x)
    for result, expected in zip(results, (y, *torch.autograd.grad(y, [x, *dense.parameters()], grad)), strict=True):
        assert_equal(result, expected, "replayed")


def test_gemms_leave_multiprocessors_free():
    mesh = ProcessGrid(Grid(x=1, y=1, z=1), device_type="cuda", gemm="kernels", free_sms=16)
    matmul_equals_dense(mesh, torch.device("cuda"), 1)


def nccl_of_one():
    """A communicator of one rank runs NCCL's own kernels: enough to see streams, options, registration and capture."""
    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    user = init_device_mesh("cuda", (1,), mesh_dim_names=("x",))
    mesh = ProcessGrid.from_mesh(user, max_ctas=4)
    assert mesh.backend == "nccl" and mesh.groups_per_axis == 2
    gather, scatter = mesh.group(("x",)), mesh.group(("x",), "scatter")
    assert gather is user.get_group("x") and scatter is not gather
    options = scatter._get_backend(device).options
    assert options.is_high_priority_stream and options.config.max_ctas == 4
    try:
        mesh.collectives.ring = BufferRing(allocate=nccl.registered_memory([gather, scatter]))
    except GridError as error:
        print(f"registration not tested: {error}")
    x = small_integers((64, 32, 128), 0, device=device)
    steps = [Step(kind, ("x",), dim) for kind in ("all_gather", "reduce_scatter") for dim in range(3)]
    steps += [Step("all_reduce", ("x",)), Step("all_to_all", ("x",), 0, 2)]

    def run():
        handles = [mesh.collectives.start(step, x, ("test",), "forward") for step in steps]
        return [handle.wait() for handle in handles]

    for _ in range(2):
        for step, result in zip(steps, run(), strict=True):
            assert_equal(result, x, str(step))
    assert mesh.collectives.ring.waiting_bytes and not mesh.collectives.in_flight
    mesh.collectives.start(steps[1], x, ("test",), "forward")  # dropped: the stream waits for it
    assert not mesh.collectives.in_flight and not mesh.collectives.ring.lent_bytes
    graph, results = captured(run)
    x.neg_()
    graph.replay()
    for step, result in zip(steps, results, strict=True):
        assert_equal(result, x, f"{step}, replayed")
    del graph
    torch.cuda.synchronize()
    dist.destroy_process_group()


def nccl_of_all():
    """Launched by torchrun, one rank a device, or several on each."""
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", rank)
    if int(os.environ["WORLD_SIZE"]) > torch.cuda.device_count():
        device = share_gpu(rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    grid = {2: Grid(z=1, x=2, y=1), 4: Grid(z=1, x=2, y=2), 8: Grid(z=2, x=2, y=2)}[dist.get_world_size()]
    mesh = ProcessGrid(grid)
    assert mesh.groups_per_axis == 2
    for chunks in (1, 2, 4):
        matmul_equals_dense(mesh, device, chunks)
        mlp_equals_dense(mesh, device, chunks)
    dist.barrier()
    dist.destroy_process_group()


def models_on_nccl():
    """A stock Llama and a stack of torch's own layers train as dense ones do, eagerly and as one graph."""
    rank = int(os.environ["LOCAL_RANK"])
    device = share_gpu(rank)
    dist.init_process_group("nccl", device_id=device)
    mesh = ProcessGrid(Grid(x=2, y=2))
    for make, inputs in ((stock_llama, token_batch), (torch_stack, float_batch)):
        expected = trained(make, inputs, device, None, False)
        for is_captured in (False, True):
            found = trained(make, inputs, device, mesh, is_captured)
            assert torch.allclose(found, expected, rtol=2e-4, atol=2e-5), (make, is_captured, found, expected)
    dist.barrier()
    dist.destroy_process_group()


def stock_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, num_hidden_layers=2, max_position_embeddings=64, **sizes))


def token_batch(device):
    ids = torch.randint(128, (4, 32), generator=torch.Generator().manual_seed(1)).to(device)
    return {"input_ids": ids, "labels": ids}


class torch_stack(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(64, 16)

    def forward(self, x):
        return self.head(self.encoder(x))


def float_batch(device):
    return {"x": torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(1)).to(device)}


def trained(make, inputs, device, mesh, is_captured):
    """The losses of six steps of AdamW."""
    torch.manual_seed(0)
    model, given = make().to(device), inputs(device)
    if mesh is not None:
        ndtp.parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3, device=device), capturable=True)

    def step(*tensors):
        out = model(**dict(zip(given, tensors, strict=True)))
        loss = out.loss if hasattr(out, "loss") else out.square().mean()
        loss.backward()
        ndtp.nn.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = ndtp.capture(step, tuple(given.values())) if is_captured else step
    return torch.tensor([float(run(*given.values())) for _ in range(6)])


def run_here(name, *launcher):
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, *launcher, *([] if launcher else [__file__]), name],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=250,
    )  # fmt: skip
    said = [line for line in done.stderr.splitlines() if line.startswith("[rank") or "NCCL" in line]
    assert done.returncode == 0, "\n".join(said)[:6000] or done.stderr[-4000:]


def test_nccl_on_one_rank():
    run_here("nccl_of_one")


def torchrun(name, ranks):
    run_here(name, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", __file__)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_nccl_on_every_device():
    torchrun("nccl_of_all", 1 << (min(torch.cuda.device_count(), 8).bit_length() - 1))


def test_nccl_of_four_ranks_that_share_gpus():
    torchrun("nccl_of_all", 4)


def test_models_on_nccl_of_ranks_that_share_gpus():
    torchrun("models_on_nccl", 4)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
