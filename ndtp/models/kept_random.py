"""`random_kept`: what a model's code draws in a run of ndtp's own is drawn again in the user's."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def random_kept(devices: Iterable[object] = ()) -> Iterator[None]:
    """Restore the random states of torch, on the CPU and on these devices, of numpy and of Python when it is left."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
