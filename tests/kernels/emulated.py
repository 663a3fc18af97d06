"""Runs Gluon kernels without a device: their own Python source, on stand-ins for Gluon's functions.

Gluon has no interpreter.  Here each partition of each program is a thread of which one runs at a time; which one goes
on, and when a copy lands, is drawn.  Values are torch tensors.  What hardware would do silently is an error: an operand
that is written while a product reads it, a result that changes while it is copied out, a wait that never ends.
"""

import functools
import threading
import types
from types import SimpleNamespace

import torch
from emulated_memory import Barrier, Descriptor, Handle, Landing, Layout, Memory, Pointer, Value
from ndtp_kernels.triton_code import epilogue, hopper, tiles


class Machine:
    """A cluster of programs.

    Args:
        choose: picks one of those that can go on.
        remote: whether an arrival at a barrier of both programs reaches the first one's, as later versions of Triton
            say; in 3.7.1 it stays where it is.
    """

    def __init__(self, programs, num_warps, choose, remote=True):
        self.programs, self.num_warps, self.choose, self.remote = programs, num_warps, choose, remote
        self.tasks, self.copies, self.barriers, self.memory = [], [], {}, {}
        self.traces, self.turn, self.failed = {}, threading.Semaphore(0), None

    # ------------------------------------------------------------------------------------------- tasks

    def spawn(self, name, program, run):
        task = SimpleNamespace(
            name=name, program=program, go=threading.Semaphore(0), ready=lambda: True, ended=False, allocated=0,
            stores=[], waits="",
        )  # fmt: skip
        self.traces[name] = []

        def body():
            task.go.acquire()
            self.local.task = task
            try:
                if self.failed is None:
                    run()
            except BaseException as error:
                self.failed = self.failed or error
            task.ended = True
            self.turn.release()

        task.thread = threading.Thread(target=body, daemon=True)
        task.thread.start()
        self.tasks.append(task)
        return task

    local = threading.local()

    def pause(self, ready=lambda: True, waits=""):
        """The running task lets others run, until it is ready and its turn comes again."""
        task = self.local.task
        task.ready, task.waits = ready, waits
        self.turn.release()
        task.go.acquire()
        if self.failed is not None:
            raise RuntimeError("another task has failed")

    def log(self, *operation):
        self.traces[self.local.task.name].append(operation)

    def run(self):
        while any(not task.ended for task in self.tasks):
            able = [task for task in self.tasks if not task.ended and (self.failed is not None or task.ready())]
            landing = [copy for copy in self.copies if not isinstance(copy, Landing) or copy.before[0]]
            if self.failed is None and not able and not landing:
                stuck = ", ".join(f"{task.name} waits for {task.waits}" for task in self.tasks if not task.ended)
                self.failed = AssertionError(f"nothing can go on: {stuck}")
                continue
            picked = able[0] if self.failed is not None else self.choose(able + landing)
            if isinstance(picked, types.SimpleNamespace):
                picked.go.release()
                self.turn.acquire()
            else:
                self.copies.remove(picked)
                picked()
        if self.failed is not None:
            raise self.failed

    # ------------------------------------------------------------------------------------- stand-ins

    def namespace(self, program_id):
        """What the kernels' module names, with Gluon's functions replaced."""
        tl = SimpleNamespace(
            minimum=lambda x, y, propagate_nan=None: torch.clamp(x, max=y), maximum=lambda x, y: torch.clamp(x, min=y),
            abs=torch.abs, exp=torch.exp, exp2=torch.exp2, rsqrt=torch.rsqrt, where=torch.where, erf=torch.erf,
            sigmoid=torch.sigmoid, PropagateNan=SimpleNamespace(ALL=1),
            static_assert=lambda condition, text="": None,
        )  # fmt: skip
        gl = SimpleNamespace(
            num_ctas=lambda: self.programs, num_warps=lambda: self.num_warps, program_id=lambda axis: program_id,
            maximum=max, cdiv=lambda a, b: -(-a // b), static_range=range, float32=torch.float32, int64=torch.int64,
            NVMMASharedLayout=Layout, NVMMADistributedLayout=lambda *a: Layout(a[3] if len(a) > 3 else ()),
            SliceLayout=lambda dim, layout: (dim, layout), zeros=self.zeros, arange=self.arange,
            load=lambda pointer, mask, other: pointer.load(mask, other),
            convert_layout=lambda x, layout, assert_trivial: x, allocate_shared_memory=self.allocate,
            warp_specialize=self.specialize, static_assert=lambda condition, text: None,
        )  # fmt: skip
        mbarrier = SimpleNamespace(
            allocate_mbarrier=self.allocate_barriers, init=lambda each, count: each.init(count), wait=self.wait,
            expect=self.expect, arrive=self.arrive, sync_cluster_init=self.sync,
        )  # fmt: skip
        tma = SimpleNamespace(
            make_tensor_descriptor=Descriptor, async_copy_global_to_shared=self.copy_in,
            async_copy_shared_to_global=self.copy_out, store_wait=self.store_wait,
        )  # fmt: skip
        common = {
            "gl": gl, "tl": tl, "mbarrier": mbarrier, "tma": tma, "warpgroup_mma": self.multiply,
            "warpgroup_mma_wait": self.multiplied, "fence_async_shared": self.fence, "tcgen05_mma": self.tensor_core,
            "tcgen05_commit": self.commit, "TensorMemoryLayout": lambda *a, **k: Layout(),
            "allocate_tensor_memory": self.allocate, "get_tmem_reg_layout": lambda *a: Layout(), "TILES_OF_SUMS": 2,
            "columns": lambda x, part, parts: x[:, part * x.shape[1] // parts : (part + 1) * x.shape[1] // parts],
        }  # fmt: skip
        return common

    def functions(self, module, program_id):
        """The module's functions and those that they call, over the stand-ins."""
        names = self.namespace(program_id)
        used = [(tiles, ("grouped", "share_of", "stage_of"))]
        used.append((epilogue, [name for name, value in vars(epilogue).items() if hasattr(value, "fn")]))
        used.append((hopper, ("load_tiles", "store_part")))
        used.append((module, [name for name in vars(module) if name in ("multiply_tiles", "store_tiles")]))
        for place, wanted in used:
            for name in wanted:
                names[name] = over(getattr(place, name), names)
        return names

    def zeros(self, shape, dtype, layout):
        shape = [size // (2 if dim == layout.split else 1) for dim, size in enumerate(shape)]
        return Value(torch.zeros(shape, dtype=dtype))

    def arange(self, start, stop, layout):
        dim, whole = layout
        found = torch.arange(start, stop)
        if whole.split is not None and whole.split == 1 - dim:
            found = found.chunk(2)[self.local.task.program]
        return Value(found)

    def allocate(self, dtype, shape, layout):
        task = self.local.task
        lead = len(shape) - 2
        shape = [size // (2 if dim - lead == layout.split else 1) for dim, size in enumerate(shape)]
        task.allocated += 1
        made = [torch.full(shape, torch.nan, dtype=dtype) for _ in range(self.programs)]
        peers = self.memory.setdefault(task.allocated, made)
        return Memory(peers[task.program], layout, f"{task.program}:{task.allocated}.", peers)

    def allocate_barriers(self, batch, two_ctas=False):
        task = self.local.task
        task.allocated += 1
        own = []
        for at in range(batch):
            made = [Barrier(f"{program}:{task.allocated}.{at}") for program in range(self.programs)]
            peers = self.barriers.setdefault((task.allocated, at), made)
            own.append(Handle(self, peers, task.program, two_ctas and self.programs > 1))
        return SimpleNamespace(index=own.__getitem__, shape=(batch,))

    def specialize(self, partitions, warps, registers):
        own = self.local.task
        spawned = []
        for number, (run, arguments) in enumerate(partitions):
            name = f"{own.name}.{number}.{run.__name__}"
            task = self.spawn(name, own.program, lambda run=run, arguments=arguments: run(*arguments))
            spawned.append(task)
        self.pause(lambda: all(task.ended for task in spawned), "its partitions")

    def sync(self):
        count = self.started = getattr(self, "started", 0) + 1
        self.pause(lambda: self.started == self.programs, f"the cluster {count}")

    def wait(self, handle, parity):
        barrier = handle.waited
        if barrier is None:
            return
        self.log("wait", barrier.name, parity)
        self.pause(lambda: barrier.passed(parity), f"{barrier.name} of parity {parity}")

    def arrive(self, handle, pred=True):
        if pred:
            self.log("arrive", handle.arrived.name)
            handle.arrived.change(1)
            self.pause()

    def expect(self, handle, num_bytes):
        self.log("expect", handle.own.name, num_bytes)
        handle.own.change(1, num_bytes)

    def copy_in(self, descriptor, corner, handle, to, multicast=False):
        program = self.local.task.program
        programs = [program]
        if multicast:
            if program:
                return
            programs = range(self.programs)
        for each in programs:
            where = descriptor.place(corner, each)
            data = descriptor.matrix[where]
            into, barrier = to.peers[each], handle.peers[each]
            name = f"{each}{to.name[1:]}"
            self.log("copy", name, barrier.name, descriptor.nbytes_per_cta, tuple(corner))
            into.fill_(torch.nan)  # from now on it may be written

            def land(data=data, into=into, barrier=barrier):
                into.zero_()
                into[: data.shape[0], : data.shape[1]] = data
                barrier.change(0, -descriptor.nbytes_per_cta)

            self.copies.append(land)
        self.pause()

    def begin(self, a, b):
        """A product has begun to read; what it reads is remembered."""
        self.log("read", a.name, b.name)
        return a, b, a.values.clone(), b.values.clone()

    def end(self, started):
        a, b, left, right = started
        self.log("did read", a.name, b.name)
        for memory, before in ((a, left), (b, right)):
            assert torch.equal(memory.values, before), f"{memory.name} was written while a product read it"
        return left.double() @ right.double()

    def multiply(self, a, b, acc, is_async):
        sums, pending = acc if isinstance(acc, tuple) else (acc, [])
        started = self.begin(a, b)
        self.pause()
        return sums, [*pending, started]

    def multiplied(self, outstanding, deps):
        sums, pending = deps[0]
        while len(pending) > outstanding:
            sums = sums + self.end(pending[0]).float()
            pending = pending[1:]
        return (sums, pending) if pending or outstanding else Value(sums)

    def tensor_core(self, a, b, acc, use_acc):
        queue = self.local.task.stores  # of this task: products and what is to arrive when they are done, in order
        queue.append((self.begin(a, b), acc, use_acc))
        self.pause()

    def commit(self, handle):
        task = self.local.task
        todo, task.stores = task.stores, []
        trace = self.traces[task.name]
        before = task.__dict__.setdefault("last", [True])
        done = [False]

        def land(before=before):
            for started, acc, use_acc in todo:
                a, b, left, right = started
                for memory, was in ((a, left), (b, right)):
                    assert torch.equal(memory.values, was), f"{memory.name} was written while a product read it"
                product = left.double() @ right.double()
                acc.values.copy_(acc.values + product if use_acc else product)
            done[0] = True
            handle.arrived.change(1)

        trace.append(("commit", handle.arrived.name, *((s[0].name, s[1].name) for s, _, _ in todo)))
        # The tensor core works in order: this lands when what was committed before has.
        task.last = done
        self.copies.append(Landing(land, before))
        self.pause()

    def fence(self):
        self.local.task.fenced = True

    def copy_out(self, descriptor, corner, source):
        task = self.local.task
        assert task.__dict__.pop("fenced", False), "stored, and copied out without a fence"
        task.stores.append((descriptor, corner, source, source.values.clone()))
        self.pause()

    def store_wait(self, outstanding):
        task = self.local.task
        for descriptor, corner, source, before in task.stores:
            assert torch.equal(source.values, before), f"{source.name} was written while it was copied out"
            where = descriptor.place(corner, task.program)
            rows, columns = (max(0, each.stop - each.start) for each in where)
            if rows and columns:
                descriptor.matrix[where] = before[:rows, :columns]
        task.stores = []


def kind_of(each):
    """Of what may go on next: the partition's function, "copy", or the kernel itself."""
    return each.name.rpartition(".")[2] if isinstance(each, SimpleNamespace) else "copy"


def over(jitted, names):
    """A kernel's function as Python, over other globals."""
    source = getattr(jitted, "fn", jitted)
    return types.FunctionType(source.__code__, names, source.__name__, source.__defaults__)


def launch(module, tensors, grid, choose, *, programs=1, num_warps=4, remote=True, **constants):
    """Run a kernel; returns what each partition did, of each cluster, and the arrivals that each barrier waits for.

    Args:
        tensors: A, B, C, pre, bias, None where there is none.
        constants: the kernel's other arguments.
    """
    kernel = module.hopper_kernel if module is hopper else module.blackwell_kernel
    traces = {}
    for program_id in range(grid):
        machine = Machine(programs, num_warps, choose, remote)
        names = machine.functions(module, program_id)
        run = over(kernel, names)
        pointers = {name: None if tensor is None else Pointer(tensor) for name, tensor in tensors.items()}
        for program in range(programs):
            machine.spawn(f"{program_id}.{program}", program, functools.partial(run, **pointers, **constants))
        machine.run()
        counts = {each.name: each.count for peers in machine.barriers.values() for each in peers}
        traces[program_id] = ({name: trace for name, trace in machine.traces.items() if trace}, counts)
    return traces
