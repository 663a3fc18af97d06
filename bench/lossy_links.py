"""Training over links that are slow, lose or reorder packets, or go away: are numbers right, and is the link named?

    nice python bench/lossy_links.py --out bench/results/lossy_links.json          # needs root, iproute2, /dev/net/tun
    python bench/lossy_links.py --only "gone for 4 s" "loss 5 %"

Four ranks train a stock Llama of transformers through `ndtp.parallelize`, each in namespaces of its own (network,
processes, host name), as if on four machines; the switch between them is `switch.py`.  Losses and weights must be those
of a calm run, to the last bit.  A link that is bad must be told of, with its rank and axes, in a calm run nothing.
Where a link does not come back, every rank must end with a `CommunicationError` that names the rank behind it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from starved import Starved
from switch import SUBNET, Switch, Weather, cluster
from transformers import LlamaConfig, LlamaForCausalLM

import ndtp
from ndtp import Grid, ProcessGrid
from ndtp.collectives.last_words import tell_of

RANKS, STEPS, PAUSE_S, PORT = 4, 20, 0.6, 29519
TIMEOUT_S, SHORT_S, LIMIT_S = 120.0, 15.0, 240.0
_NEW_NETWORK, _NEW_PROCESSES, _NEW_NAMES, _NEW_MOUNTS, _PRIVATE = (
    0x40000000,
    0x20000000,
    0x04000000,
    0x00020000,
    0x44000,
)


@dataclass(frozen=True)
class Case:
    """What the links are like, and what ranks must say.

    Attributes:
        named: the ranks that a warning, or the errors, must name; () where there is nothing to tell.
        all_alike: a warning must tell of all links.
        fatal: all ranks end with an error.
    """

    weather: list[Weather] = field(default_factory=list)
    named: tuple[int, ...] = ()
    all_alike: bool = False
    fatal: bool = False


def _flapping(rank: int) -> list[Weather]:
    return [Weather((rank,), begin=2.0 + 2 * i, end=2.7 + 2 * i, gone=True) for i in range(6)]


CASES = {
    "calm": Case(),
    "loss 1 %": Case([Weather(loss=0.01)], all_alike=True),
    "loss 5 %": Case([Weather(loss=0.05)], all_alike=True),
    "loss 5 % of rank 2": Case([Weather((2,), loss=0.05)], (2,)),
    "loss 5 % between ranks 1 and 3": Case([Weather((1, 3), between=True, loss=0.05)], (1, 3)),
    "reordered": Case([Weather(jitter_ms=5.0, late_share=0.2)]),
    "far": Case([Weather((2,), delay_ms=25.0)], (2,)),
    "narrow": Case([Weather((2,), rate=100_000.0)], (2,)),
    "gone for 4 s": Case([Weather((2,), begin=3.0, end=7.0, gone=True)], (2,)),
    "store gone for 4 s": Case([Weather((0,), begin=3.0, end=7.0, gone=True)], (0,)),
    "flapping": Case(_flapping(2), (2,)),
    "gone": Case([Weather((2,), begin=3.0, gone=True)], (2,), fatal=True),
    "store gone": Case([Weather((0,), begin=3.0, gone=True)], (0,), fatal=True),
}


def train(rank: int, folder: Path, timeout: float) -> dict[str, Any]:
    """Train, and say what came of it."""
    said: list[str] = []
    warnings.showwarning = lambda message, *_: said.append(str(message))  # type: ignore[assignment]
    warnings.simplefilter("always", RuntimeWarning)
    dist.init_process_group("gloo", init_method=f"tcp://{SUBNET}.1:{PORT}", rank=rank, world_size=RANKS)
    found: dict[str, Any] = {"error": "", "how": "", "ranks": []}
    losses = hashlib.sha256()
    begin = time.monotonic()
    try:
        mesh = ProcessGrid(Grid(x=2, y=2), timeout=timeout)
        torch.manual_seed(0)
        sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
        config = LlamaConfig(vocab_size=64, num_hidden_layers=2, num_key_value_heads=2, use_cache=False, **sizes)
        model: Any = ndtp.parallelize(LlamaForCausalLM(config), mesh, scheme="2d")
        optimizer = torch.optim.AdamW(model.parameters())
        ids = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(1))
        for step in range(STEPS):
            model(input_ids=ids, labels=ids).loss.backward()
            if step == 0:
                dist.barrier()
                if rank == 0:
                    (folder / "began").touch()
            ndtp.nn.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                losses.update(repr(model(input_ids=ids, labels=ids).loss.item()).encode())
            time.sleep(PAUSE_S)
        for each in model.state_dict().values():
            local = each.to_local() if hasattr(each, "to_local") else each
            losses.update(local.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        found["links"] = str(ndtp.links())
        dist.barrier()
    except Exception as error:
        told = tell_of(error)
        found |= {"error": type(told).__name__, "text": str(told)[:800]}
        found |= {"how": getattr(told, "how", ""), "ranks": list(getattr(told, "ranks", ()))}
        if not isinstance(told, ndtp.CommunicationError):
            found["text"] = traceback.format_exc()[-1500:]
    return {
        **found,
        "numbers": losses.hexdigest()[:16],
        "warnings": said,
        "seconds": round(time.monotonic() - begin, 1),
    }


def start(rank: int, network: str, folder: Path, timeout: float) -> int:
    """Fork a rank that is alone in its namespaces; returns the process that waits for it."""
    outer = os.fork()
    if outer:
        return outer
    libc, code = ctypes.CDLL(None, use_errno=True), 1
    try:
        os.setsid()
        with open(f"/var/run/netns/{network}") as there:
            assert libc.setns(there.fileno(), _NEW_NETWORK) == 0
        assert libc.unshare(_NEW_PROCESSES | _NEW_NAMES | _NEW_MOUNTS) == 0
        inner = os.fork()
        if inner == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(int(LIMIT_S))
            assert libc.mount(b"none", b"/", None, _PRIVATE, None) == 0
            assert libc.mount(b"proc", b"/proc", b"proc", 0, None) == 0
            name = f"machine{rank}".encode()
            assert libc.sethostname(name, len(name)) == 0
            os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
            os.dup2(os.open(folder / f"{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
            said = train(rank, folder, timeout)
            (folder / f"{rank}.part").write_text(json.dumps(said))
            (folder / f"{rank}.part").rename(folder / f"{rank}.json")
            code = 0
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1])
    finally:
        os._exit(code if 0 <= code < 256 else 1)


def tried(case: Case, seed: int) -> dict[str, Any]:
    """One run of a case: what each rank said, and what the switch did."""
    with tempfile.TemporaryDirectory(prefix="ndtp-links-") as temporary, cluster(RANKS) as (names, ends):
        folder = Path(temporary)
        pids = [start(rank, name, folder, SHORT_S if case.fatal else TIMEOUT_S) for rank, name in enumerate(names)]
        alive, until = set(pids), time.monotonic() + LIMIT_S

        def began() -> float | None:
            path = folder / "began"
            if not hasattr(began, "at") and path.exists():
                began.at = time.monotonic()  # type: ignore[attr-defined]
            return getattr(began, "at", None)

        def ended() -> bool:
            for pid in list(alive):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    alive.discard(pid)
            return not alive or time.monotonic() > until

        os.nice(-15)  # it is the wire, which no processor keeps waiting
        switch, starved = Switch(ends, case.weather, seed, began), Starved([os.getpid(), *pids])
        try:
            switch.serve(ended)
        finally:
            os.nice(15)
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        paths = [folder / f"{rank}.json" for rank in range(RANKS)]
        said = [json.loads(path.read_text()) if path.exists() else None for path in paths]
        for rank, each in enumerate(said):
            if each is None:
                print(f"rank {rank}:", (folder / f"{rank}.err").read_text(errors="replace")[-1500:], file=sys.stderr)
    frames = {"carried": switch.carried, "lost": switch.lost, "late": switch.late}
    return {"frames": frames, "switch_starved_s": round(starved.seconds(), 1), "said": said}


def judged(case: Case, run: dict[str, Any], calm: list[str]) -> dict[str, Any]:
    """Whether ranks said what they must."""
    said = run["said"]
    if any(each is None for each in said):
        return {"hung": sum(each is None for each in said)}
    told = [text for each in said for text in each["warnings"] if " link: " in text]
    found: dict[str, Any] = {"equal": None if case.fatal else [each["numbers"] for each in said] == calm}
    found["warned"] = told
    if case.fatal:
        named = [tuple(each["ranks"]) == case.named for each in said]
        found["errors"] = [f"{each['error']} {each['how']} {each['ranks']}" for each in said]
        found["named"] = sum(named)
    else:
        found["failed"] = [each["error"] for each in said if each["error"]]
        names = [f"rank {rank} (" for rank in case.named]
        head = [text.partition(": ")[2].partition(", over")[0] for text in told]
        if case.named:
            found["named"] = any(all(name in text for name in names) for text in head)
        elif case.all_alike:
            found["named"] = any("all machines" in text for text in told)
        else:
            found["named"] = not told
    found["seconds"] = max(each["seconds"] for each in said)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--times", type=int, default=1, help="runs of each case, in all")
    parser.add_argument("--out", type=Path, help="a record, which a second call goes on from")
    parser.add_argument("--keep", action="store_true", help="print all that ranks said")
    given = parser.parse_args()
    if os.geteuid() != 0 or not Path("/dev/net/tun").exists():
        sys.exit("lossy_links: needs root and /dev/net/tun")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leave through the clean-up
    torch.set_num_threads(1)
    record = json.loads(given.out.read_text()) if given.out and given.out.exists() else {"calm": [], "runs": []}
    assert threading.active_count() == 1, "ranks are forks"
    for name in dict.fromkeys(["calm", *given.only]):
        done = [each for each in record["runs"] if each["case"] == name]
        for turn in range(len(done), given.times if name in given.only else 1):
            run = tried(CASES[name], turn)
            if given.keep:
                print(json.dumps(run, indent=1))
            if name == "calm" and not record["calm"] and all(run["said"]):
                record["calm"] = [each["numbers"] for each in run["said"]]
            line = {"case": name, **judged(CASES[name], run, record["calm"]), "frames": run["frames"]}
            line["switch_starved_s"] = run["switch_starved_s"]
            print(json.dumps(line), flush=True)
            record["runs"].append(line)
            if given.out:
                given.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
