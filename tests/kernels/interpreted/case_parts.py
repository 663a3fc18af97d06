"""Products whose rows come or go part by part, in the interpreter: other threads are the copy engines."""

import threading
import time
from itertools import pairwise

import pytest
import torch
from ndtp_kernels import parts
from ndtp_kernels.errors import KernelError
from poisoned import integers

TILE = (16, 16, 16)


def shifted(rank, ranks, distance):
    return (rank + distance) % ranks


@pytest.mark.parametrize(("ranks", "rank"), [(2, 0), (2, 1), (4, 3), (8, 5)])
def test_rows_are_read_when_they_have_come(ranks, rank):
    """Until its flag is up a part is NaN: one early read, and the result is, too."""
    whole, b = integers(ranks * 20, 24), integers(24, 20)
    a, flags = torch.full_like(whole, torch.nan), torch.zeros(ranks, dtype=torch.int32)
    polled = []

    def copy_engine():
        for distance in range(ranks):
            time.sleep(0.02)
            part = shifted(rank, ranks, distance)
            polled.append(bool(torch.isnan(a[part * 20 : part * 20 + 20]).all()))
            a[part * 20 : part * 20 + 20] = whole[part * 20 : part * 20 + 20]
            flags[part] = 1

    thread = threading.Thread(target=copy_engine)
    thread.start()
    c = parts.gemm_of_arrivals(a, b, flags, rank, tile=TILE)
    thread.join()
    assert torch.equal(c, whole @ b) and all(polled)


@pytest.mark.parametrize(("ranks", "rank"), [(2, 0), (2, 1), (4, 3), (8, 5)])
def test_parts_go_in_the_order_in_which_they_are_pulled(ranks, rank):
    """Whoever is told that a part is there finds all of it, and the parts come one after another, one's own last."""
    a, b = integers(ranks * 20, 24), integers(24, 20)
    c, counts = torch.full((ranks * 20, 20), torch.nan), torch.zeros(ranks, dtype=torch.int32)
    tiles, seen, taken = parts.tiles_of_part(a, b, ranks, TILE), [], torch.empty(ranks * 20, 20)

    def copy_engine():
        order = [shifted(rank, ranks, -distance) for distance in (*range(1, ranks), 0)]
        for i, part in enumerate(order):
            while counts[part] < tiles:
                time.sleep(0.001)
            taken[part * 20 : part * 20 + 20] = c[part * 20 : part * 20 + 20]
            seen.append(all(counts[a] >= counts[b] for a, b in pairwise(order[i:])))

    thread = threading.Thread(target=copy_engine)
    thread.start()
    assert parts.gemm_of_departures(a, b, counts, rank, out=c, tile=TILE) is c
    thread.join()
    assert tiles == 4 and counts.tolist() == [tiles] * ranks and all(seen)
    assert torch.equal(taken, a @ b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_dtypes_and_strides(dtype):
    a, b = integers(36, 40).to(dtype), integers(28, 40).to(dtype)
    c = parts.gemm_of_arrivals(a, b.mT, torch.ones(2, dtype=torch.int32), 1, tile=TILE)
    assert c.dtype == dtype and torch.equal(c.double(), a.double() @ b.double().mT)


@pytest.mark.parametrize(("act", "before"), [(parts.put_signal, 1), (parts.take_signal, 0)])
def test_signals_alternate(act, before):
    """Put when it is down, taken when it is up: the kernel waits until somebody else has seen to that."""
    signal, log = torch.tensor(before, dtype=torch.int32), []

    def peer():
        time.sleep(0.1)
        log.append("peer")
        signal.fill_(1 - before)

    thread = threading.Thread(target=peer)
    thread.start()
    act(signal)
    log.append("kernel")
    thread.join()
    assert signal == before and log == ["peer", "kernel"]
    parts.wait_for(torch.tensor(4, dtype=torch.int32), 3)


def test_what_does_not_fit():
    flags = torch.ones(3, dtype=torch.int32)
    with pytest.raises(KernelError, match="16 rows in 3 parts"):
        parts.gemm_of_arrivals(integers(16, 8), integers(8, 4), flags, 0)
    with pytest.raises(KernelError, match="A is"):
        parts.gemm_of_departures(integers(15, 8), integers(4, 8), flags, 0)
