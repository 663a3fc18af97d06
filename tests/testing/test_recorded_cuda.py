"""The stand-in for CUDA finds what is wrong with streams, memory, collectives and graphs, and leaves the rest alone."""

from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ndtp.testing import CudaFault, RecordedCuda


@contextmanager
def world(ranks=2):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def another_stream_reads_too_early(waits):
    x, side = torch.zeros(8), torch.cuda.Stream()
    x.add_(1)
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
    torch.cuda.current_stream().wait_stream(side)
    return y


def another_stream_writes_what_is_read(waits):
    x, side = torch.zeros(8), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    y = x[:4] * 2
    if waits:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x[0:8:2].fill_(3)
    torch.cuda.current_stream().wait_stream(side)
    return y


def an_event_is_recorded_before_the_work(waits):
    x, side, event = torch.zeros(8), torch.cuda.Stream(), torch.cuda.Event()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        if not waits:
            event.record()
        x.add_(1)
        if waits:
            event.record()
    event.wait()
    return x + 1


def memory_is_freed_under_another_stream(waits):
    x, side = torch.zeros(8), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
    if waits:
        x.record_stream(side)
    del x
    torch.cuda.current_stream().wait_stream(side)
    return y


def a_collective_is_not_waited_for(waits):
    with world():
        x = torch.zeros(8)
        work = dist.all_reduce(x, async_op=True)
        if waits:
            work.wait()
        return x + 1


def what_is_sent_is_overwritten(waits):
    with world() as group:
        x, landing = torch.zeros(8), torch.zeros(16)
        work = group._allgather_base(landing, x)
        if waits:
            work.wait()
        x.fill_(1)
        work.wait()


def what_is_sent_is_freed(waits):
    with world() as group:
        x, landing = torch.zeros(8), torch.zeros(16)
        work = group._allgather_base(landing, x)
        if waits:
            work.wait()
        del x
        work.wait()
        return landing


def a_functional_collective_is_used_too_early(waits):
    with world() as group:
        y = torch.ops._c10d_functional.all_reduce(torch.zeros(8), "sum", group.group_name)
        if not waits:
            z = y + 1
        z = torch.ops._c10d_functional.wait_tensor(y)
        return z + 1


def captured(step):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def a_captured_stream_does_not_come_back(waits):
    x, side = torch.zeros(8), torch.cuda.Stream()

    def step():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1)
        if waits:
            torch.cuda.current_stream().wait_stream(side)

    captured(step)


def an_event_from_outside_is_waited_for(waits):
    x, event = torch.zeros(8), torch.cuda.Event()
    event.record()

    def step():
        if waits:
            event.record()
        event.wait()
        x.add_(1)

    captured(step)


def the_host_reads(waits):
    x = torch.zeros(8)
    captured(lambda: x.sum() if waits else x.sum().item())


def memory_of_a_graph_is_freed(waits):
    x, kept = torch.ones(8), []

    def step():
        kept.append(x * 2)

    graph = captured(step)
    if not waits:
        del x, step
    graph.replay()
    assert kept[0].sum() == 16


def a_generator_that_the_graph_does_not_know(waits):
    generator = torch.Generator()
    graph = torch.cuda.CUDAGraph()
    if waits:
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        torch.rand(4, generator=generator)


def a_captured_event_is_waited_for_outside(waits):
    event = torch.cuda.Event()
    captured(event.record)
    if not waits:
        event.wait()


FAULTS = {
    another_stream_reads_too_early: "race: aten.mul on stream 1 reads",
    another_stream_writes_what_is_read: "race: aten.fill_ on stream 1 writes",
    an_event_is_recorded_before_the_work: "race: aten.add on the default stream reads",
    memory_is_freed_under_another_stream: "early free: .* while aten.mul on stream 1 may still run",
    a_collective_is_not_waited_for: "nobody waited for allreduce on communicator 1 of ranks 0,1",
    what_is_sent_is_overwritten: "race: aten.fill_ on the default stream writes .* _allgather_base",
    what_is_sent_is_freed: "early free: .* while _allgather_base on communicator 1",
    a_functional_collective_is_used_too_early: "race: aten.add on the default stream reads .* all_reduce",
    a_captured_stream_does_not_come_back: "cudaErrorStreamCaptureUnjoined",
    an_event_from_outside_is_waited_for: "cudaErrorStreamCaptureIsolation",
    the_host_reads: r"whose result the host reads, during a capture .* at .*test_recorded_cuda.py:\d+: captured",
    memory_of_a_graph_is_freed: "aten.mul of a replay uses the memory .* freed since the capture",
    a_generator_that_the_graph_does_not_know: "a generator that the graph does not know",
    a_captured_event_is_waited_for_outside: "captured in a graph that has ended",
}


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("program", FAULTS, ids=lambda program: program.__name__)
def test_a_fault_is_found_and_what_is_right_is_not(program, waits):
    with nullcontext() if waits else pytest.raises(CudaFault, match=FAULTS[program]), RecordedCuda():
        program(waits)


def test_a_capture_runs_nothing_and_a_replay_computes_with_what_is_there():
    with RecordedCuda() as cuda:
        x, total, out = torch.ones(4), torch.zeros(4), []

        def step():
            cuda.kernel("mine", reads=[x], writes=[total], run=lambda total, x: total.add_(x))
            out.append(total * 2 + torch.full((4,), 1.0))

        graph = captured(step)
        assert total.sum() == 0, "a capture runs nothing"
        for count in range(1, 4):
            x.fill_(count)
            graph.replay()
            assert total[0] == sum(range(1, count + 1)) and out[0][0] == 2 * total[0] + 1


def test_everything_is_as_it_was_afterwards():
    before = torch.cuda.Stream, torch.cuda.current_stream, dist.ProcessGroup.allreduce, torch.Tensor.record_stream
    with pytest.raises(ZeroDivisionError), RecordedCuda():
        _ = 1 / 0
    assert before == (
        torch.cuda.Stream, torch.cuda.current_stream, dist.ProcessGroup.allreduce, torch.Tensor.record_stream,
    )  # fmt: skip
