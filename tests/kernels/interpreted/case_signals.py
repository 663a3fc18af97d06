"""Signals between ranks of one device, in the interpreter: another thread is the peer."""

import threading
import time

import pytest
import torch
from ndtp_kernels import signals


@pytest.mark.parametrize(("act", "before"), [(signals.put_signal, 1), (signals.take_signal, 0)])
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
