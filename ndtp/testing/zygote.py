"""A process with torch imported and nothing running, from which ranks are forked.

Why not multiprocessing's forkserver: that one is shared with the user's program (its preload list is global), lets no
rank have children (a DataLoader, say), and imports the user's `__main__` into every rank whether it is needed or not.

    parent --socket--> zygote --fork--> rank 0 .. rank p-1
       ^------------- one status pipe per rank --------'      pid first, then the exit code
       ^------------- one message socket per rank -----'      see `worker`

The zygote owns the ranks: when its socket to the parent closes, for whatever reason, it kills them and exits.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import count

from ndtp.testing import rank_asserts
from ndtp.testing.messages import Birth

Work = Callable[[Birth, int, int], None]  # being a rank: `ndtp.testing.worker.work`
STATUS = struct.Struct("<q")
_LENGTH = struct.Struct("<I")
_QUESTION = 0  # as a length: nothing to fork, a number to send back
_NUM_FDS = 4
_ANSWER_S = 180.0  # importing torch on a cold, busy machine included
_END_S = 5.0
# DTensor imports torch._dynamo in its first operation: here once, there in every rank.
_PRELOAD = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.distributed.tensor",
    "torch._dynamo",
    "ndtp.testing.worker",
    "ndtp.models.parallelize",
)
# Of the zygote alone; the ranks get the parent's.  Asking whether CUDA is there must not initialise it, or forked ranks
# could not use it; and a process that has threads should not fork.
_ENVIRON = {
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
# Of these, ranks find imported whatever the parent has imported when they start, as after a fork of the parent itself:
# a second of every rank that compiles, two where it builds a model of transformers.
_PACKAGES = ("ndtp", "torch", "transformers", "peft", "hypothesis", "pytest")
# Ranks look for garbage less often than Python does, which begins after 700 objects: half of a step of a small model.
_GARBAGE_THRESHOLDS = (20_000, 20, 20)


class Zygote:
    """The parent's side: starts the zygote process when it is first needed, and again should it have died.

    `folder` is a private temporary directory that disappears with the zygote process, even if the parent is killed;
    `numbers` makes names of files there, each of them once.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._end = lambda: None
        self._lock = threading.RLock()  # pools in other threads share this one
        self._num_questions = 0
        self._told: set[str] = set()  # modules of the parent that the process has been asked to import
        self.numbers = count()
        self.folder = ""

    def answers(self) -> bool:
        """Return whether the process and its ranks live; a kill that came before the call is seen.

        A process that has been sent SIGKILL is there for a moment still, and so are the ranks, which it takes along;
        but it does not answer any more.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                return False
            assert self._control is not None
            self._num_questions = number = (self._num_questions + 1) % 2**32
            try:
                self._control.sendall(_LENGTH.pack(_QUESTION) + _LENGTH.pack(number))
                while number != _LENGTH.unpack(_receive_exactly(self._control, _LENGTH.size))[0]:
                    pass  # to a question whose asker was interrupted
            except (OSError, EOFError):
                return False
            return True

    def is_lost(self, folder: str) -> bool:
        """Return whether the process with that folder died of a signal, and not of an error of its own, which would
        recur.
        """
        with self._lock:
            if folder != self.folder:  # another thread has started the next one
                return True
            if self._process is None or self.answers():
                return False
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(_END_S) < 0
            return True  # it neither answers nor ends

    def ensure_running(self) -> str:
        """Start a process unless there is one that answers.  Returns its folder."""
        if sys.platform == "win32":
            raise RuntimeError("ndtp.testing starts its ranks with fork(), which Windows lacks. fix: run under WSL")
        with self._lock:
            if not self.answers():
                self._start()
            return self.folder

    def _start(self) -> None:
        self._end()
        folder = tempfile.mkdtemp(prefix="ndtp-ranks-")
        ours, theirs = socket.socketpair()
        ours.settimeout(_ANSWER_S)
        self._told = set()
        command = (
            # It ends with its parent: where all processes are asked to end, ranks may have to save first.
            "import signal, sys; [signal.signal(each, signal.SIG_IGN) for each in (signal.SIGINT, signal.SIGTERM)]; "
            f"sys.path[:] = {sys.path!r}; from ndtp.testing.zygote import serve; from ndtp.testing.worker import work; "
            f"serve({theirs.fileno()}, {folder!r}, {_PRELOAD!r}, {os.getpid()}, work)"
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", command],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **_ENVIRON},
            )
        self._control, self.folder = ours, folder
        self._end = weakref.finalize(self, _shut_down, self._process, ours, folder, os.getpid())

    def fork(self, folder: str, birth: Birth, connection_fd: int, status_fd: int) -> None:
        """Ask the process with that folder for one rank.

        The two descriptors are its ends of the message socket and of the status pipe.
        """
        with self._lock, open(os.devnull, "wb") as null:
            if folder != self.folder:
                raise RuntimeError("the process that starts the ranks died; another has taken its place")
            request = pickle.dumps((birth, self._imported_since()))
            assert self._control is not None
            output_fds = [fd if _is_open(fd) else null.fileno() for fd in (1, 2)]
            fds = [connection_fd, status_fd, *output_fds]
            try:
                socket.send_fds(self._control, [_LENGTH.pack(len(request))], fds)
                self._control.sendall(request)
            except OSError as error:
                raise RuntimeError("the process that starts the ranks died; its stderr says why") from error

    def _imported_since(self) -> list[str]:
        """Modules of `_PACKAGES` that the parent has imported since this was asked, in that order."""
        names = [
            name
            for name, module in list(sys.modules.items())
            if name not in self._told
            and name.partition(".")[0] in _PACKAGES
            and module is not None
            and not name.endswith("__main__")
            and not name.startswith("torch.testing._internal")  # some of it starts CUDA, which no fork could use then
        ]
        self._told.update(names)
        return names


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _shut_down(process: subprocess.Popen[bytes], control: socket.socket, folder: str, owner_pid: int) -> None:
    control.close()
    if os.getpid() != owner_pid:  # a fork of the parent is exiting: the zygote is not its own
        return
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    shutil.rmtree(folder, ignore_errors=True)


# ---- below: runs in the zygote process ----


def serve(control_fd: int, folder: str, preload: Sequence[str], parent_pid: int, work: Work) -> None:
    """Fork ranks on request until the parent closes the socket or disappears.  Never returns."""
    control = socket.socket(fileno=control_fd)
    status_fds: dict[int, int] = {}  # pid of a living rank -> write end of its status pipe
    try:
        _import(preload)
        gc.set_threshold(*_GARBAGE_THRESHOLDS)

        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_write, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write)
        # A fork of the parent may hold the socket open beyond the parent's death: hence the look at getppid.
        while os.getppid() == parent_pid:
            readable, _, _ = select.select([control_fd, wake_read], [], [], 1.0)
            if wake_read in readable:
                os.read(wake_read, 4096)
            _reap(status_fds)
            if control_fd in readable and not _fork_one(control, status_fds, (wake_read, wake_write), work):
                break
    finally:
        # Only the zygote comes here: a forked rank ends in os._exit.
        for pid in status_fds:
            for kill in (os.kill, os.killpg):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _import(names: Sequence[str]) -> None:
    gc.disable()  # nothing that is imported is garbage, and to look for some takes a fifth of the time
    for name in names:
        with contextlib.suppress(Exception), _without_gpus():  # the ranks will see it, should they need the module
            importlib.import_module(name)
    gc.collect()
    gc.freeze()  # the ranks share these pages with us as long as no collection touches them
    gc.enable()


@contextlib.contextmanager
def _without_gpus() -> Iterator[None]:
    """Let no module that is imported here start CUDA, which no rank could use then; such a one is left to the ranks."""
    cuda = sys.modules.get("torch.cuda")
    if cuda is None:
        yield
        return
    starts = cuda._lazy_init  # type: ignore[attr-defined]
    cuda._lazy_init = _refuse_to_start  # type: ignore[attr-defined]
    try:
        yield
    finally:
        cuda._lazy_init = starts  # type: ignore[attr-defined]


def _refuse_to_start() -> None:
    raise RuntimeError("the process from which ranks are forked must not start CUDA")


def _reap(status_fds: dict[int, int]) -> None:
    for pid in list(status_fds):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            status_fd = status_fds.pop(pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)  # what the rank itself had started
            with contextlib.suppress(OSError):
                os.write(status_fd, STATUS.pack(os.waitstatus_to_exitcode(status)))
            os.close(status_fd)


def _fork_one(control: socket.socket, status_fds: dict[int, int], wake_fds: Sequence[int], work: Work) -> bool:
    """Serve one request; False when the parent has closed the socket."""
    header, fds, _, _ = socket.recv_fds(control, _LENGTH.size, _NUM_FDS)
    if not header:
        return False
    header += _receive_exactly(control, _LENGTH.size - len(header))
    if _LENGTH.unpack(header)[0] == _QUESTION:
        control.sendall(_receive_exactly(control, _LENGTH.size))
        return True
    birth: Birth
    birth, names = pickle.loads(_receive_exactly(control, _LENGTH.unpack(header)[0]))
    if names:
        _import(names)
    if "pytest" in sys.modules:
        rank_asserts.prepare()
    connection_fd, status_fd, stdout_fd, stderr_fd = fds
    zygote_pid = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python >= 3.12, should a preloaded library have a thread
        pid = os.fork()
    if pid:
        status_fds[pid] = status_fd
        with contextlib.suppress(OSError):
            os.write(status_fd, STATUS.pack(pid))
        for fd in (connection_fd, stdout_fd, stderr_fd):
            os.close(fd)
        return True

    exit_code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(stdout_fd, 1)
        os.dup2(stderr_fd, 2)
        control.close()
        # A rank must not hold what tells others that somebody has died.
        for fd in (*status_fds.values(), *wake_fds, *fds[1:]):
            os.close(fd)
        work(birth, connection_fd, zygote_pid)
        exit_code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(exit_code)  # no atexit: destructors of a broken process group may hang


def _receive_exactly(control: socket.socket, num_bytes: int) -> bytes:
    parts = []
    while num_bytes:
        part = control.recv(num_bytes)
        if not part:
            raise EOFError("the parent closed its socket in the middle of a request")
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)
