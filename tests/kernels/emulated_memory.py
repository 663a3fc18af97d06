"""What a Gluon kernel names, in `emulated`: barriers, memory, descriptors, values in registers."""

from types import SimpleNamespace

import torch


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes are there."""

    def __init__(self, name):
        self.name, self.phase, self.bytes = name, 0, 0

    def init(self, count):
        self.count = self.pending = count

    def change(self, arrivals=0, num_bytes=0):
        self.pending -= arrivals
        self.bytes += num_bytes
        assert self.pending >= 0, f"{self.name}: more arrivals than a phase has"
        if self.pending == self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count

    def passed(self, parity):
        return self.phase % 2 != parity


class Layout:
    def __init__(self, cga=()):
        self.cga = [list(basis) for basis in cga]

    @classmethod
    def get_default_for(cls, shape, dtype, cga_layout=()):
        return cls(cga_layout)

    @property
    def split(self):
        """The dim that the two programs of a cluster share out; None where both hold all."""
        return self.cga[0].index(1) if self.cga and any(self.cga[0]) else None


class Memory:
    """A view of shared or tensor memory of one program."""

    def __init__(self, values, layout, name, peers):
        self.values, self.layout, self.name, self.peers = values, layout, name, peers

    shape = property(lambda self: self.values.shape)
    dtype = property(lambda self: self.values.dtype)

    def index(self, at):
        return Memory(self.values[at], self.layout, f"{self.name}{at}", [peer[at] for peer in self.peers])

    def permute(self, order):
        return Memory(self.values.permute(order), self.layout, self.name, None)

    def slice(self, start, length):
        return Memory(self.values[:, start : start + length], self.layout, self.name, None)

    def load(self, layout):
        return Value(self.values.clone())

    def store(self, value):
        self.values.copy_(value)


class Value(torch.Tensor):
    """A tensor in registers, with the names that kernels use."""

    @staticmethod
    def __new__(cls, data):
        return data.as_subclass(cls)


class Pointer:
    """The address of a tensor's first element, or of several elements."""

    def __init__(self, tensor, offsets=0):
        self.tensor, self.offsets, self.dtype = tensor, offsets, SimpleNamespace(element_ty=tensor.dtype)

    def __add__(self, offsets):
        return Pointer(self.tensor, self.offsets + offsets)

    def load(self, mask, other):
        flat = self.tensor.as_strided((self.tensor.untyped_storage().nbytes() // self.tensor.element_size(),), (1,), 0)
        offsets = torch.where(mask, torch.as_tensor(self.offsets), 0).long()
        return Value(torch.where(mask, flat[offsets], torch.tensor(other, dtype=self.tensor.dtype)))


class Descriptor:
    def __init__(self, base, shape, strides, block, layout):
        self.matrix, self.block, self.layout = base.tensor.as_strided(shape, strides), list(block), layout
        if layout.split is not None:
            self.block[layout.split] //= 2
        self.dtype = base.tensor.dtype
        self.nbytes_per_cta = self.block[0] * self.block[1] * base.tensor.element_size()

    def place(self, corner, program):
        """Where a block lies in the matrix, what of it is inside."""
        found = []
        for dim, (at, size, end) in enumerate(zip(corner, self.block, self.matrix.shape, strict=True)):
            at += size * program * (dim == self.layout.split)
            found.append(slice(at, max(at, min(at + size, end))))
        return tuple(found)


class Landing:
    """Something asynchronous that comes after another."""

    def __init__(self, land, before):
        self.land, self.before = land, before

    def __call__(self):
        self.land()


class Handle:
    """A barrier as a program names it."""

    def __init__(self, machine, peers, program, shared):
        self.machine, self.peers, self.shared, self.program = machine, peers, shared, program
        self.own = peers[program]

    @property
    def arrived(self):
        return self.peers[0] if self.shared and self.machine.remote else self.own

    @property
    def waited(self):
        """None where only the first program waits."""
        return None if self.shared and self.program else self.own

    def init(self, count):
        self.own.init(count * (2 if self.shared and self.machine.remote else 1))
