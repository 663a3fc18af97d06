"""The facts that ranks compare of a tensor, a call or a thread: few numbers that are cheap to read."""

from __future__ import annotations

import hashlib
import math
import random
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple
from zlib import adler32, crc32

import numpy
import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_LEAVES = (Tensor, *PLAIN)
_OF_NUMPY = {torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64}
_OF_NUMPY |= {torch.int8, torch.int16, torch.int32, torch.int64}
_SAMPLE = 4096  # numbers of a tensor of real ones that are looked at
_BLOCK = 1 << 20  # words of a tensor that are hashed at once
SUMMARY = "all of "  # begins topics that are told where no others differ
NOT_KNOWN = "not known"  # of a fact in which a rank may have what the others have
FINE, COARSE = 1e-3, 1e-2  # how near real numbers of ranks are that differ by rounding; of 16 bits, or of more
# Of a multiplicative hash modulo 2^64, see Knuth, "The Art of Computer Programming", 6.4.
_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)


class Fact(NamedTuple):
    """Something that ranks must have alike.

    Attributes:
        topic: what it is, in words.
        value: what is compared, as text; its `repr` is the same wherever it is the same.
        may_differ: the axes of the grid along which ranks may have others.
    """

    topic: str
    value: Any
    may_differ: tuple[str, ...] = ()


class Fingerprint(NamedTuple):
    """Tensors of real numbers on two lines: equal ones fall together, those that differ by rounding nearly so.

    Attributes:
        first, second: sums with fixed weights.
        square: the sum of squares, which says how near is near.
    """

    first: float = 0.0
    second: float = 0.0
    square: float = 0.0

    def __add__(self, other: tuple[Any, ...]) -> Fingerprint:
        return Fingerprint(*(a + b for a, b in zip(self, other, strict=True)))

    def is_near(self, other: Fingerprint, tolerance: float = COARSE) -> bool:
        """Return whether both projections can be of one tensor; a number that is not finite is near to any."""
        scale = math.sqrt(max(self.square, other.square, 0.0)) * tolerance
        near = abs(self.first - other.first) <= scale and abs(self.second - other.second) <= scale
        return near or not all(map(math.isfinite, (*self, *other)))


def digest(*parts: object) -> int:
    """63 bits of what parts print as: the same number in every process."""
    return _number(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest())


def _number(eight: bytes) -> int:
    return int.from_bytes(eight, "little") >> 1


def hash_of_bytes(plain: bytes | memoryview) -> int:
    """64 bits in a tenth of the time of a cryptographic hash; nobody makes bytes that collide on purpose."""
    return crc32(plain) << 32 | adler32(plain)


def hash_of(x: Tensor) -> Tensor | int:
    """Return a hash of all bytes of an integer tensor; on an accelerator, as a tensor that nobody waits for."""
    if x.device.type == "cpu":
        return _number(hashlib.blake2b(bytes_of(x), digest_size=8).digest())
    x = x.detach()
    words = x.contiguous().flatten()
    words = words.view(torch.uint8) if words.dtype == torch.bool else words
    return content_of(words.to(torch.int64))


@torch.no_grad()
def hash_of_content(x: Tensor) -> Tensor | int:
    """A hash of all bytes of a tensor of any dtype, computed where it lies; zero of one without numbers."""
    if x.is_meta or not x.numel() or x.is_quantized:
        return 0
    if is_traceable_wrapper_subclass(x):  # as torchao has quantised weights
        return sum(hash_of_content(getattr(x, name)) for name in x.__tensor_flatten__()[0])
    x = x.detach().resolve_conj().resolve_neg().reshape(-1)
    data = x.contiguous().view(torch.uint8)
    if x.is_cpu:
        return hash_of_bytes(data.numpy().data) >> 1
    data = torch.nn.functional.pad(data, (0, -data.numel() % 8)) if data.numel() % 8 else data
    words = (data if data.storage_offset() % 8 == 0 else data.clone()).view(torch.int64)
    return torch.stack([content_of(block) for block in words.split(_BLOCK)]).sum()


def content_of(words: Tensor) -> Tensor:
    """A hash of integers of 64 bits and their order, computed where they lie."""
    mixed = words * (torch.arange(1, 2 * words.numel(), 2, device=words.device) * _MULTIPLIER)
    return (mixed ^ (mixed >> 29)).sum()


def projection_of(x: Tensor, place: int = 0) -> Tensor | Fingerprint:
    """Return the projection of a sample of a tensor of real numbers; on an accelerator, its three numbers there.

    Args:
        place: which of several tensors it is.
    """
    if x.is_cpu and x.numel() == 1 and not x.is_complex():  # a loss
        number = x.item()
        return Fingerprint(number, number, number * number)
    return _sampled(x, place)


@torch.no_grad()
def _sampled(x: Tensor, place: int) -> Tensor | Fingerprint:
    x = x.detach()
    flat = x.coalesce().values() if x.is_sparse else x  # a gradient of an embedding may be sparse
    flat = flat.resolve_conj().resolve_neg().reshape(-1)
    if flat.numel() > _SAMPLE:
        apart = -(-flat.numel() // _SAMPLE)
        while math.gcd(apart, flat.numel()) > 1:  # or they would be those of one column, or of some
            apart += 1
        flat = flat[::apart]
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten()
    flat = flat.double()
    first, second = (each.to(flat.device) for each in _weights(flat.numel(), place))
    sums = torch.stack((flat @ first, flat @ second, flat @ flat))
    return Fingerprint(*sums.tolist()) if x.device.type == "cpu" else sums


@cache
def _weights(count: int, place: int) -> tuple[Tensor, Tensor]:
    at = torch.arange(count, dtype=torch.float64, device="cpu")
    return torch.cos(at * 1.618 + place + 1), torch.cos(at * at * 0.707 + 2 * place + 2)


def bytes_of(x: Tensor) -> bytes:
    """The bytes of an integer tensor of the host, entry by entry, in one copy."""
    known = x if x.dtype in _OF_NUMPY else x.contiguous().view(torch.uint8)
    return known.numpy().tobytes()  # type: ignore[no-any-return]


def leaves_of(given: Any, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield the leaves of arguments by name: tensors, plain values, and the kinds of everything else."""
    if isinstance(given, _LEAVES):
        yield from [(name, given)] if is_strided(given) else parts_of(given, name)
    elif isinstance(given, Mapping):
        for key, value in given.items():
            yield from leaves_of(value, f"{name}.{key}" if name else str(key))
    elif isinstance(given, (list, tuple)):
        for index, value in enumerate(given):
            yield from leaves_of(value, f"{name}[{index}]" if name else f"argument {index}")
    else:
        length = getattr(given, "get_seq_length", None)  # a cache of keys and values
        yield name, f"{type(given).__name__}{'' if length is None else f' of {_length(length)}'}"


def is_strided(x: object) -> bool:
    """Whether a value is no tensor, or one whose numbers lie in one block of memory: not sparse, not nested."""
    return not isinstance(x, Tensor) or (x.layout is torch.strided and not x.is_nested)


def parts_of(x: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield, of a tensor that is sparse or nested, its form, and the tensors that hold its numbers, by name."""
    if x.is_nested:
        yield name, f"nested of {x.dim()} dims {str(x.dtype).removeprefix('torch.')} on {x.device.type}"
        if x.layout is torch.strided:
            yield f"{name} sizes", x._nested_tensor_size()
        else:
            yield from ((f"{name} offsets", x.offsets()), (f"{name} values", x.values()))
        return
    yield name, f"{str(x.layout).removeprefix('torch.')} {form_of(x)}"
    if x.layout is torch.sparse_coo:
        yield from ((f"{name} indices", x._indices()), (f"{name} values", x._values()))
        return
    if x.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from ((f"{name} {part}", getattr(x, part)()) for part in ("crow_indices", "col_indices", "values"))
    elif x.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from ((f"{name} {part}", getattr(x, part)()) for part in ("ccol_indices", "row_indices", "values"))


def _length(length: Any) -> str:
    try:
        return str(length())
    except Exception:
        return "unknown length"


def form_of(x: Tensor) -> str:
    return f"{tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device.type}"


def modes(device_type: str) -> tuple[object, ...]:
    """Modes of torch that decide what a call computes; `thread_facts` names them."""
    on_cpu = torch.is_autocast_enabled("cpu") and str(torch.get_autocast_dtype("cpu"))
    found = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        on_cpu,
        torch._C._get_float32_matmul_precision(),
        torch._C._get_deterministic_algorithms(),
    )
    if device_type == "cpu":
        return found
    there = torch.is_autocast_enabled(device_type) and str(torch.get_autocast_dtype(device_type))
    return (*found[:3], there, *found[3:])


def thread_facts(found: Sequence[object], device_type: str) -> list[Fact]:
    """`modes` by their names."""
    grad, inference, *casts, precision, deterministic = found
    devices = ("cpu", device_type)[: len(casts)]
    return [
        Fact("grad mode", grad),
        Fact("inference mode", inference),
        Fact("autocast", ", ".join(f"{device} {cast or 'off'}" for device, cast in zip(devices, casts, strict=True))),
        Fact("precision of float32 products", precision),
        Fact("deterministic algorithms", deterministic),
    ]


def random_states(device_type: str, of: Iterable[str]) -> dict[str, bytes]:
    """Return the states of generators, by name, which every draw from them changes."""
    return {name: _GENERATORS[name](device_type) for name in of}


def _may_draw(thread: threading.Thread) -> bool:
    """Whether a thread is another one of the program: none of ndtp, of autograd, or tqdm's, which watches bars."""
    is_known = thread.name.startswith("ndtp") or type(thread).__name__ in ("TMonitor", "_DummyThread")
    return thread is not threading.current_thread() and not is_known


def drawn_since(before: Mapping[str, bytes], device_type: str, may_differ: tuple[str, ...]) -> dict[str, Fact]:
    """Return, for each generator from which numbers were drawn since, by name, the state that it had before.

    Those of NumPy and Python are all threads': where the program has others, it is not known who has drawn.
    """
    names = [name for name, now in random_states(device_type, before).items() if now != before[name]]
    is_alone = not any(map(_may_draw, threading.enumerate())) if names else True
    states = {name: short(before[name]) if is_alone or name == "torch" else NOT_KNOWN for name in names}
    return {name: Fact(f"random numbers of {name} before the last call", x, may_differ) for name, x in states.items()}


def _state_of_torch(device_type: str) -> bytes:
    state = torch.default_generator.get_state().numpy().tobytes()
    if device_type == "cuda" and torch.cuda.is_initialized():
        state += torch.cuda.get_rng_state().numpy().tobytes()
    return state


def _state_of_numpy(_: str) -> bytes:
    state = numpy.random.get_state(legacy=False)
    own = dict(state.pop("state"))  # of the Mersenne Twister, or of another one that a program has put in its place
    return bytes(own.pop("key", b"")) + repr((own, state)).encode()


def _state_of_python(_: str) -> bytes:
    _, words, gauss = random.getstate()
    return f"{hash(words)} {gauss}".encode()


_GENERATORS = {"torch": _state_of_torch, "NumPy": _state_of_numpy, "Python": _state_of_python}
GENERATORS = tuple(_GENERATORS)


def short(state: bytes) -> str:
    return hashlib.blake2b(state, digest_size=4).hexdigest()
