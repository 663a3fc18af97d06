"""`ndtp.capture`: a replay is the step, bit for bit; what a graph cannot hold is named, with its line."""

import tempfile
from functools import partial

import pytest
import torch
import torch.distributed as dist
from test_on_streams import GRIDS
from torch.testing._internal.distributed.fake_pg import FakeStore

import ndtp
from ndtp import CaptureError, Grid, ProcessGrid
from ndtp.testing import RecordedCuda

pytestmark = pytest.mark.cpu

CALLS = 6


class Training:
    """A block with dropout on one rank, AdamW, and a step of both."""

    def __init__(self, p=0.1, optimizer=torch.optim.AdamW, **settings):
        torch.manual_seed(0)
        mesh = ProcessGrid(Grid(x=1), device_type="cpu")
        self.block = ndtp.nn.MLP(8, 16, mesh=mesh, scheme="1d", seed=0)
        self.drop = ndtp.nn.Dropout(p, self.block.out_layout, mesh)
        self.optimizer = optimizer(self.block.parameters(), lr=torch.tensor(1e-2), **settings)
        self.batches = torch.randn(CALLS, 32, 8)

    def loss(self, x):
        return self.drop(self.block(x)).square().mean()

    def step(self, x):
        loss = self.loss(x)
        loss.backward()
        norm = ndtp.nn.clip_grad_norm_(self.block.parameters(), 0.1)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"loss": loss, "norm": norm}

    def run(self, step, rates=None):
        torch.manual_seed(5)
        seen = []
        for i, x in enumerate(self.batches):
            for group in self.optimizer.param_groups if rates else ():
                if step == self.step:
                    group["lr"].fill_(rates[i])
                else:
                    group["lr"] = rates[i]  # a number, as schedules set it
            seen.append(step(x))
        return [(each["loss"].item(), each["norm"].item()) for each in seen] + [
            p.to_local().tolist() if hasattr(p, "to_local") else p.tolist() for p in self.block.parameters()
        ]


@pytest.mark.parametrize(
    "made", [{"capturable": True}, {"optimizer": torch.optim.SGD, "momentum": 0.9, "fused": True}], ids=["AdamW", "SGD"]
)
def test_a_replay_is_the_step_with_dropout_clipping_and_rates_that_change(made):
    rates = [1e-2 * (i + 1) for i in range(CALLS)]
    with RecordedCuda():
        eager = Training(**made)
        expected = eager.run(eager.step, rates)
    with RecordedCuda():
        training = Training(**{k: v for k, v in made.items() if k not in ("capturable", "fused")})
        step = ndtp.capture(training.step, training.batches[0])
        assert "captured at call 4" in repr(step)
        assert training.run(step, rates) == expected and step.volume.total == 0
        assert repr(step).endswith("Training.step: captured>")


def checkpointed(training):
    def step(x):
        from torch.utils.checkpoint import checkpoint

        loss = checkpoint(training.loss, x, use_reentrant=False)
        loss.backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        return {"loss": loss, "norm": loss}

    return step


def test_a_checkpointed_forward_draws_the_mask_that_it_drew():
    runs = []
    for captures in (False, True):
        with RecordedCuda():
            training = Training(capturable=True)
            step = checkpointed(training)
            training.step = step
            runs.append(training.run(ndtp.capture(step, training.batches[0]) if captures else step))
    assert runs[0] == runs[1]


# --------------------------------------------------------------------------------------------------- what is refused


def reads_in_the_host(training):
    def step(x):
        loss = training.step(x)["loss"]
        if loss.item() > 0:  # here
            return loss
        return None

    return step


def counts_in_the_host(training):
    count = iter(range(100))

    def step(x):
        return training.step(x * (1 + next(count)))["loss"]  # here

    return step


def does_something_else(training):
    count = iter(range(100))

    def step(x):
        return training.step(x + 1 if next(count) % 2 else x)["loss"]  # here

    return step


def leaves_gradients(training):
    def step(x):
        for p in training.block.parameters():
            p.grad = None
        training.loss(x).backward()
        training.optimizer.step()
        return x.sum()

    return step


def returns_a_number(training):
    def step(x):
        training.step(x)
        return 3.0

    return step


REFUSED = {
    reads_in_the_host: r"test_captured.py:\d+.*_local_scalar_dense: the host reads",
    counts_in_the_host: r"test_captured.py:\d+: aten.mul: 3, where the call before had 2; a graph keeps one",
    does_something_else: r"test_captured.py:\d+.*another operation than in the call before: aten.* of test_captured",
    returns_a_number: "returns 3.0, which would stay so",
}


@pytest.mark.parametrize("program", REFUSED, ids=lambda program: program.__name__)
def test_what_a_graph_cannot_hold_is_named(program):
    with RecordedCuda():
        training = Training(p=0.0)
        step = ndtp.capture(program(training), training.batches[0])
        with pytest.raises(CaptureError, match=REFUSED[program]) as caught:
            for x in training.batches:
                step(x)
        with pytest.raises(CaptureError, match=r"ndtp\.capture: the step"):
            step(training.batches[0])  # it does not go on in another way
    if program in (reads_in_the_host, counts_in_the_host):
        number = int(str(caught.value).partition("test_captured.py:")[2].partition(":")[0].split(" ")[0])
        with open(__file__) as file:
            assert "# here" in file.read().splitlines()[number - 1]


def test_what_changes_after_the_capture_is_refused_or_taken_over():
    with RecordedCuda():
        training = Training()
        step = ndtp.capture(training.step, training.batches[0])
        for x in training.batches:
            step(x)
        with pytest.raises(CaptureError, match=r"tensor 0 of the arguments is \(31, 8\).*the example has \(32, 8\)"):
            step(torch.zeros(31, 8))
        training.optimizer.param_groups[0]["weight_decay"] = 0.5
        with pytest.raises(CaptureError, match=r"weight_decay of an optimizer is 0.5, the graph has 0.01"):
            step(x)
        training.optimizer.param_groups[0]["weight_decay"] = 0.01
        step(x)
        training.optimizer.load_state_dict(training.optimizer.state_dict())
        with pytest.raises(CaptureError, match="the state of AdamW was loaded after the capture"):
            step(x)


def test_a_model_that_is_set_otherwise_since_the_capture_is_refused():
    """A replay would go on to drop out, and to train what is frozen."""
    with RecordedCuda():
        training = Training()
        step = ndtp.capture(training.step, training.batches[0])
        for x in training.batches:
            step(x)
        training.block.up.eval()
        with pytest.raises(CaptureError, match=r"training of MLP\.up is False, the graph has True\n  fix: .* anew"):
            step(x)
        training.block.train()
        training.drop.eval()
        with pytest.raises(CaptureError, match="training of Dropout is False, the graph has True"):
            step(x)
        training.drop.train()
        training.block.down.weight.requires_grad_(False)
        with pytest.raises(CaptureError, match=r"requires_grad of MLP\.down\.weight is False, the graph has True"):
            step(x)
        training.block.down.weight.requires_grad_()
        with pytest.raises(CaptureError, match=r"torch\.is_grad_enabled\(\) is False"), torch.no_grad():
            step(x)
        cast = torch.autocast(x.device.type)
        with pytest.raises(CaptureError, match=r"autocast is torch\.bfloat16, the graph has None"), cast:
            step(x)
        step(x)


def test_gradients_that_are_left_are_refused():
    with RecordedCuda():
        training = Training()
        step = ndtp.capture(leaves_gradients(training), training.batches[0])
        for x in training.batches[:3]:
            step(x)
        for p in training.block.parameters():
            p.grad = None
        with pytest.raises(CaptureError, match=r"leaves gradients of 4 parameters(.|\n)*fix: zero_grad"):
            step(x)


def test_a_cpu_has_no_graphs_and_says_so():
    training = Training()
    with pytest.raises(
        CaptureError, match=r"the example is on cpu, where there are no CUDA graphs\n  fix: .*eager=True"
    ):
        ndtp.capture(training.step, training.batches[0])
    step = ndtp.capture(training.step, training.batches[0], eager=True)
    assert "runs as it is" in repr(step) and step(training.batches[0])["loss"] > 0


# ------------------------------------------------------------------------------------------------------ whole models


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=1, **sizes))


def trained(mesh, captures):
    """Losses and norms of a stock Llama: two micro-batches, clipping, AdamW, a scheduler."""
    model = ndtp.parallelize(llama(), mesh, scheme="3d")
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), capturable=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (i + 1))

    def step(ids):
        with mesh.accumulate():
            (model(input_ids=ids[0], labels=ids[0]).loss / 2).backward()
        loss = model(input_ids=ids[1], labels=ids[1]).loss / 2
        loss.backward()
        norm = ndtp.nn.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm

    torch.manual_seed(5)
    data = torch.randint(32, (5, 2, 4, 4))
    run = ndtp.capture(step, data[0]) if captures else step
    seen = []
    for ids in data:
        seen.append([x.item() for x in run(ids)])
        schedule.step()
    return seen, None if not captures else run.volume


def test_a_whole_step_of_a_stock_llama_is_captured():
    """Forward, backward, two micro-batches, clipping and the optimizer on 2x2x2: no race, nothing crosses the edge."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        with RecordedCuda():
            _, volume = trained(ProcessGrid(GRIDS["3d"], device_type="cpu", groups_per_axis=2), captures=True)
            assert volume.total > 0
    finally:
        dist.destroy_process_group()


def test_other_memory_of_a_parameter_is_refused():
    """A graph computes with the memory that it was captured with, which stays as long as the graph."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with RecordedCuda():
            block = ndtp.nn.MLP(8, 16, mesh=ProcessGrid(Grid(x=2), device_type="cpu"), scheme="1d", seed=0)
            optimizer = torch.optim.AdamW(block.parameters(), lr=torch.tensor(1e-2), capturable=True)

            def step(x):
                block(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

            x = torch.ones(4, 8)
            captured = ndtp.capture(step, (x,))
            for _ in range(5):
                captured(x)
            before = block.up.weight.data
            block.up.weight.data = before * 2
            with pytest.raises(CaptureError, match=r"a parameter \(16, 8\) was given other memory"):
                captured(x)
            block.up.weight.data = before
            captured(x)
    finally:
        dist.destroy_process_group()


def eager_and_captured(path):
    """On real ranks, whose numbers are right: gloo moves them, and plays a backend with streams."""
    from ndtp.testing.cuda.works import register_backend

    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    dist.init_process_group(register_backend(), store=dist.FileStore(path, size), rank=rank, world_size=size)
    seen = []
    for captures in (False, True):
        with RecordedCuda():
            mesh = ProcessGrid(Grid(z=2, x=1, y=1), device_type="cpu", groups_per_axis=2)
            seen.append(trained(mesh, captures)[0])
    return seen


def test_replays_of_a_stock_llama_are_bit_equal_to_eager_steps():
    with tempfile.TemporaryDirectory() as folder:
        for eager, captured in ndtp.testing.run(partial(eager_and_captured, f"{folder}/store"), ranks=2):
            assert eager == captured and eager[0] != eager[-1]
