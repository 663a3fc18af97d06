"""One rank: joins the gloo group, then calls functions until the parent closes the connection."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import importlib
import io
import os
import pickle
import resource
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from collections import deque
from multiprocessing.connection import Connection
from types import ModuleType

import torch
import torch.distributed as dist

from ndtp.collectives.last_words import tell_of
from ndtp.testing import rank_asserts
from ndtp.testing.device import use_test_device
from ndtp.testing.messages import (
    IMPORTING_MAIN,
    TRACE_SIGNAL,
    Birth,
    CallMessage,
    Printed,
    Raised,
    Ready,
    Returned,
    called,
    dumps_result,
)

# Process groups that a call created stay alive, since a cached mesh may come back in a later call (DTensor caches
# some itself).  A gloo group of two holds five descriptors and three threads, so they are finite: past this many
# descriptors, or half of what the system allows, the pool replaces its ranks.
_MAX_OPEN_FDS = 640
_MOST_PRINTS = 1000  # that are kept of a rank whose prints are not shown


class _Sender:
    """The connection, usable from any thread of the rank."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def send(self, message: object, pickled_result: bytes = b"") -> None:
        with self._lock:
            self._connection.send_bytes(pickle.dumps(message) + pickled_result)


class _Stdout(io.TextIOBase):
    """sys.stdout of a rank: whole lines go to the parent, which writes them to its own, or are dropped."""

    encoding = "utf-8"

    def __init__(self, sender: _Sender) -> None:
        self._sender = sender
        self._pending = ""
        self.echo = False
        self.unseen: deque[str] | None = None  # what is not echoed, where a test may want to show it

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1

    def write(self, text: str) -> int:
        if self.echo:
            self._pending += text
            if "\n" in text:
                self.flush()
        elif self.unseen is not None:
            self.unseen.append(text)
        return len(text)

    def flush(self) -> None:
        text, self._pending = self._pending, ""
        if text:
            self._sender.send(Printed(text))


def work(birth: Birth, connection_fd: int, zygote_pid: int) -> None:
    """Be rank `birth.rank` until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    os.setpgid(0, 0)  # so that the zygote can kill what we started along with us
    _die_with(zygote_pid)
    _let_others_finish()
    os.environ.clear()
    os.environ.update(birth.environ)
    sys.argv[:] = birth.argv
    trace_file = open(birth.trace_path, "w")  # noqa: SIM115  (faulthandler writes to it as long as we live)
    faulthandler.enable(trace_file)
    faulthandler.register(TRACE_SIGNAL, trace_file, all_threads=True)
    connection = Connection(connection_fd)
    sender = _Sender(connection)
    stdout = _Stdout(sender)
    if birth.rank:  # what C++ prints
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)
    sys.stdout = stdout

    torch.set_num_threads(1)
    _prefer_loopback()
    dist.init_process_group(
        use_test_device(birth.rank),
        store=dist.FileStore(birth.store_path, birth.num_ranks),
        rank=birth.rank,
        world_size=birth.num_ranks,
        timeout=datetime.timedelta(seconds=birth.group_timeout_s),
    )
    world = dist.group.WORLD
    sender.send(Ready())

    while True:
        try:
            stream = io.BytesIO(connection.recv_bytes())
        except (EOFError, OSError):
            return
        call: CallMessage = pickle.load(stream)
        stdout.echo = call.echo
        stdout.unseen = None if call.pytest is None else deque(maxlen=_MOST_PRINTS)
        try:
            payload = dumps_result(_perform(call, stream))
        except BaseException as error:
            stdout.flush()
            sender.send(_describe(tell_of(error), call, "".join(stdout.unseen or ())))
        else:
            stdout.flush()
            sender.send(Returned(dist.group.WORLD is world and not _short_of_fds()), payload)


def _perform(call: CallMessage, stream: io.BytesIO) -> object:
    if sys.path != call.sys_path:
        sys.path[:] = call.sys_path
        importlib.invalidate_caches()
    os.chdir(call.cwd)  # the one of the last call may have gone
    if call.pytest is not None:
        rank_asserts.install(call.pytest)
        if call.home is not None:
            rank_asserts.load(*call.home)
    if call.main is not None and sys.modules["__main__"].__name__ != "__mp_main__":
        _import_main(*call.main)
    fn, args, kwargs = pickle.load(stream)
    torch.manual_seed(0)  # a call's random numbers do not depend on the calls before it
    return called(fn, args, kwargs)


def _import_main(kind: str, name: str) -> None:
    """Import the parent's script under the name `__mp_main__`, as multiprocessing does, so its main guard holds."""
    module = ModuleType("__mp_main__")
    token = IMPORTING_MAIN.set(True)
    try:
        run = runpy.run_module if kind == "module" else runpy.run_path
        names = run(name, run_name="__mp_main__")
    finally:
        IMPORTING_MAIN.reset(token)
    module.__dict__.update(names)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module


def _describe(error: BaseException, call: CallMessage, printed: str) -> Raised:
    # The frames of ndtp.testing, at the top, say nothing to the reader.
    frames = error.__traceback__
    while frames is not None and os.path.dirname(frames.tb_frame.f_code.co_filename) == os.path.dirname(__file__):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames or error.__traceback__))
    summary = "".join(traceback.format_exception_only(type(error), error)).strip()
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        pickled = None
    when = time.monotonic()
    report = None if call.pytest is None else rank_asserts.report_of(error)
    return Raised(summary, text, pickled, when, report, printed)


def _die_with(zygote_pid: int) -> None:
    """Have the kernel kill this rank should the zygote, which kills it otherwise, be killed itself."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != zygote_pid:
        os._exit(1)


def _let_others_finish() -> None:
    """Do not take the processor from whoever runs when a message arrives: before the threads start, which inherit it.

    Who sends on gloo holds a lock of the connection.  With more ranks than processors the rank that the message wakes
    takes the sender's place at once and answers; and the sender's own thread, woken in turn, tries for that lock until
    its time is up: thousands of system calls a message, a quarter of all the time that eight ranks took on two cores.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # where a sandbox forbids it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _prefer_loopback() -> None:
    """All ranks are on this machine: do not depend on how its host name resolves.  Only in the rank's own process."""
    interfaces = {name for _, name in socket.if_nameindex()}
    for name in ("lo", "lo0"):
        if name in interfaces:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def _short_of_fds() -> bool:
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _MAX_OPEN_FDS if soft_limit == resource.RLIM_INFINITY else min(_MAX_OPEN_FDS, soft_limit // 2)
    return len(os.listdir("/dev/fd")) > limit
