"""A cluster on one machine: every rank in a network namespace of its own, behind a rate-limited link.

    python bench/slow_network.py --ranks 8 --rate 500mbit -- python bench/overlap.py --out bench/results/overlap.json

Communication then costs time and no processor, so that overlap can be measured without a GPU or a second machine.  Each
rank gets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and GLOO_SOCKET_IFNAME, as under torchrun; rank 0 may
print.  The link's own counters, /sys/class/net/eth0/statistics, are an independent check of `CommMeter`.

`--congestion bbr` has TCP pace what it sends, as hosts do whose default it is; default: reno, which does not.

Needs root, iproute2 (`ip`, `tc`) and the congestion control that is asked for, and says so where they are missing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

SUBNET = "10.77.0"
PORT = 29517
# Memory that was freed is used again, as by the allocators of GPUs, not given back and cleared by the kernel anew.
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**25),  # the most that glibc takes
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
# Reno sends what its window lets it.  bbr, which some hosts take by default, paces every connection by a rate that it
# probes for: exchanges of 0.1 to 0.3 s among eight ranks took 1.2 to 1.4 times as long as their bytes, not 1.05 to
# 1.15, and now and then an all-reduce stood still for 40 ms.
CONGESTION = ("reno", "bbr")
AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
# How else TCP of the ranks behaves.  What a connection has learnt of its link is not forgotten while a rank multiplies.
# And tbf has one queue for all connections, where network cards have many: each puts no more than 128 KiB into it at a
# time, or a gather over four ranks takes half as long again on that rank of them whose bytes are queued behind all
# others'.
SOCKETS = (
    "net.ipv4.tcp_slow_start_after_idle=0",
    "net.ipv4.tcp_limit_output_bytes=131072",
)


def run(*command: str, check: bool = True) -> str:
    return subprocess.run(command, check=check, capture_output=True, text=True).stdout


def requirements(congestion: str = "reno") -> str | None:
    """What is missing, in words; None if nothing is."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found: install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if congestion not in AVAILABLE.read_text().split():
        return f"this kernel has no {congestion}: modprobe tcp_{congestion}"
    return None


@contextlib.contextmanager
def cluster(ranks: int, rate: str, burst: str = "256kb", congestion: str = "reno") -> Iterator[list[str]]:
    """Namespaces joined by a bridge, each link limited to `rate` (tc's 500mbit, or "none") in both directions.

    A link that was idle sends `burst` at once; it must hold a packet of 64 KB before it is segmented.
    """
    tag = f"nd{os.getpid() % 100000}"
    bridge, names = f"{tag}b", [f"{tag}n{i}" for i in range(ranks)]
    try:
        run("ip", "link", "add", bridge, "type", "bridge")
        run("ip", "link", "set", bridge, "up")
        for i, name in enumerate(names):
            inside = ("ip", "netns", "exec", name)
            link = f"{tag}v{i}"
            run("ip", "netns", "add", name)
            run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "link", "set", link, "master", bridge, "up")
            run(*inside, "ip", "addr", "add", f"{SUBNET}.{i + 1}/24", "dev", "eth0")
            run(*inside, "ip", "link", "set", "eth0", "up")
            run(*inside, "ip", "link", "set", "lo", "up")
            run(*inside, "sysctl", "-q", "-w", f"net.ipv4.tcp_congestion_control={congestion}")
            run(*inside, "sysctl", "-q", "-w", *SOCKETS, check=False)
            if rate != "none":
                shape = ("root", "tbf", "rate", rate, "burst", burst, "latency", "200ms")
                run(*inside, "tc", "qdisc", "add", "dev", "eth0", *shape)
                run("tc", "qdisc", "add", "dev", link, *shape)
        yield names
    finally:
        for name in names:
            run("ip", "netns", "del", name, check=False)
        run("ip", "link", "del", bridge, check=False)


def launch(names: Sequence[str], command: Sequence[str], timeout: float) -> int:
    """Run one rank of the command in every namespace; the first that fails, or the timeout, ends all."""
    processes, errors = [], []
    for rank, name in enumerate(names):
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(len(names)),
            "LOCAL_RANK": "0",
            "MASTER_ADDR": f"{SUBNET}.1",
            "MASTER_PORT": str(PORT),
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            **KEEP_MEMORY,
        }
        errors.append(tempfile.TemporaryFile())  # noqa: SIM115
        processes.append(
            subprocess.Popen(
                ["ip", "netns", "exec", name, *command],
                env=environment,
                stdout=None if rank == 0 else subprocess.DEVNULL,
                stderr=None if rank == 0 else errors[rank],
                start_new_session=True,
            )
        )
    deadline = time.monotonic() + timeout
    try:
        while any(process.poll() is None for process in processes):
            failed = [rank for rank, process in enumerate(processes) if process.poll()]
            if failed or time.monotonic() > deadline:
                print(f"ranks {failed} failed" if failed else f"timeout after {timeout} s", file=sys.stderr)
                for rank in failed[:1]:
                    errors[rank].seek(0)
                    print(errors[rank].read().decode(errors="replace")[-4000:], file=sys.stderr)
                return 1
            time.sleep(0.05)
        return max(abs(process.returncode) for process in processes)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rate", default="500mbit", help="of tc, such as 500mbit or 10gbit; none: unlimited")
    parser.add_argument("--burst", default="256kb", help="what an idle link sends at once")
    parser.add_argument("--congestion", choices=CONGESTION, default="reno", help="control of TCP; bbr paces")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --: what every rank runs")
    arguments = parser.parse_args()
    command = [word for word in arguments.command if word != "--"]
    if not command:
        parser.error("give a command after --")
    if (missing := requirements(arguments.congestion)) is not None:
        sys.exit(f"slow_network: {missing}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave through the clean-up
    with cluster(arguments.ranks, arguments.rate, arguments.burst, arguments.congestion) as names:
        sys.exit(launch(names, command, arguments.timeout))


if __name__ == "__main__":
    main()
