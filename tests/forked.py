"""Python programs that are forks of a process which has torch: it takes them no three seconds to import it.

`with_torch` calls a function of a test in such a process.  Where that starts Python by `subprocess`, as torchrun does
and whoever starts ranks, a spare fork becomes the program: a child of its parent, with the descriptors, environment,
signals, `__main__` and end of any other.  tests/launched.py has less of that: programs as a rank's function.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import inspect
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import types
import weakref
from unittest import mock

import torch.distributed as dist

from ndtp.testing import RankPool
from ndtp.testing.messages import TRACE_SIGNAL

MOST_FDS = 16  # of a program
_EXECUTE = subprocess.Popen._execute_child
_ARGUMENTS = inspect.signature(_EXECUTE)
_spares = []


def with_torch(fn, *args, spares=1, timeout=120):
    """`fn(*args)` in a process that has torch; as many Python programs as `spares` start as forks of it.

    A program may have one of its own, for the process that forks its ranks, or as many as NDTP_SPARES of its
    environment says; one started by `-c` has none.  What is started without a spare is executed as ever.
    """
    with RankPool(1) as pool:
        return pool.run(_call, fn, args, spares, timeout=timeout)[0]


def python(*words):
    """How `python *words` ended, and what it printed."""
    return subprocess.run([sys.executable, *words], check=False, capture_output=True, text=True, timeout=120)


def _call(fn, args, spares):
    dist.destroy_process_group()
    with mock.patch.object(subprocess.Popen, "_execute_child", _execute_child):
        for _ in range(spares):
            _spares.append(Spare())
        return fn(*args)


class Spare:
    """A fork, made while this process has one thread, which waits to become a program."""

    def __init__(self):
        self.connection, theirs = socket.socketpair()
        self.pid = os.fork()
        if not self.pid:
            try:
                _wait(theirs, [*_spares, self])
            finally:
                os._exit(1)
        theirs.close()

    def become(self, held, **given):
        """Be that program; `held` are this process's descriptors for its `fds`."""
        with self.connection:
            socket.send_fds(self.connection, [b"!"], held)
            self.connection.sendall(pickle.dumps(given))


def _execute_child(self, args, *others):
    """Popen's own, but for what it does with a spare."""
    if isinstance(args, str | bytes) or args[0] != sys.executable or not _spares:
        return _EXECUTE(self, args, *others)
    given = _ARGUMENTS.bind(self, args, *others).arguments
    streams = [given["p2cread"], given["c2pwrite"], given["errwrite"]]
    held = [own if fd == -1 else fd for own, fd in enumerate(streams)]
    spare = _spares.pop()
    spare.become(
        [*held, *given["pass_fds"]],
        words=[os.fspath(word) for word in args[1:]],
        fds=[0, 1, 2, *given["pass_fds"]],
        environment=dict(os.environ if given["env"] is None else given["env"]),
        folder=given["cwd"] or os.getcwd(),
        session=given["start_new_session"],
    )
    self.pid, self._child_created = spare.pid, True
    names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    self._close_pipe_fds(*(given[name] for name in names))


# ---- below: runs in the fork ----


def _wait(theirs, spares):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for spare in spares:
        spare.connection.close()
    _spares.clear()
    asked, fds, _, _ = socket.recv_fds(theirs, 1, MOST_FDS)
    if asked:
        with theirs, theirs.makefile("rb") as file:
            given = pickle.load(file)
        _become(fds, **given)


def _become(held, words, fds, environment, folder, session):
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(fds) + 1) for fd in held]
    for fd, target in zip(above, fds, strict=True):
        os.dup2(fd, target)
    for fd in map(int, os.listdir("/dev/fd")):
        if fd not in fds:
            with contextlib.suppress(OSError):  # what listed them
                os.close(fd)
    if session:
        os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    os.chdir(folder)
    faulthandler.disable()
    faulthandler.unregister(TRACE_SIGNAL)
    # Where ndtp is installed, pytest rewrites its modules, too, and runpy cannot run one by the hook that does.
    sys.meta_path[:] = [hook for hook in sys.meta_path if type(hook).__name__ != "AssertionRewritingHook"]
    atexit.unregister(weakref.finalize._exitfunc)
    weakref.finalize._registered_with_atexit = False  # it is at the first use, so that what came before ends after it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    if words[0] == "-u":
        words = words[1:]
        sys.stdout.reconfigure(write_through=True)
    status = 0
    try:
        _run(words)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.excepthook(*sys.exc_info())
        status = 1
        if isinstance(error, KeyboardInterrupt):
            atexit._run_exitfuncs()
            sys.stdout.flush()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    if not weakref.finalize._registered_with_atexit:
        atexit.register(weakref.finalize._exitfunc)
    ctypes.pythonapi.Py_Exit(status)  # all that happens at the end of an interpreter


def _run(words):
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    sys.modules["__mp_main__"] = main  # as multiprocessing has it
    if words[0] == "-c":
        sys.argv[:] = ["-c", *words[2:]]
        sys.path.insert(0, "")
        exec(compile(words[1], "<string>", "exec", dont_inherit=True), main.__dict__)
        return
    for _ in range(int(os.environ.pop("NDTP_SPARES", 1))):
        _spares.append(Spare())
    if words[0] == "-m":
        sys.argv[:] = words[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv[:] = words
    sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
    main.__file__ = words[0]
    with open(words[0], "rb") as file:
        exec(compile(file.read(), words[0], "exec", dont_inherit=True), main.__dict__)
