"""Programs as torchrun starts them, on ranks that have torch imported already.

testing/test_launch.py starts scripts by torchrun itself: three more processes that import torch, ten seconds of them.
"""

import contextlib
import io
import os
import runpy
import socket
import sys
from unittest import mock

import torch.distributed as dist


def launch(pool, *command):
    """`python *command` on every rank of the pool: the path of a script or `-m` and a module, then its words.

    Returns what each rank printed.  The ranks' own group is gone then: the pool starts others for the next call.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return pool.run(_run, port, *map(str, command))


def _run(port, *command):
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    launched |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GROUP_RANK": 0, "TORCHELASTIC_RUN_ID": "none"}
    start = runpy.run_module if command[0] == "-m" else runpy.run_path
    words = list(command[command[0] == "-m" :])
    # Where ndtp is installed, pytest rewrites its modules, too, and runpy cannot run one by the hook that does.
    finders = [hook for hook in sys.meta_path if type(hook).__name__ != "AssertionRewritingHook"]
    printed = io.StringIO()
    with (
        mock.patch.dict(os.environ, {name: str(value) for name, value in launched.items()}),
        mock.patch.object(sys, "argv", words),
        mock.patch.object(sys, "meta_path", finders),
        mock.patch.object(sys, "path", [os.path.dirname(words[0]), *sys.path]),  # what lies beside a script
        contextlib.redirect_stdout(printed),
    ):
        try:
            start(words[0], run_name="__main__")
        except SystemExit as end:
            assert not end.code, (end.code, printed.getvalue())
    return printed.getvalue()
