"""A call imports nothing that it does not need: planning no torch, help no numpy, a model nothing of what measures."""

from __future__ import annotations

import json
import subprocess
import sys

# Each loads what it needs on top of those before it, all in one process.
STEPS = {
    "import ndtp": set(),
    "ndtp.MatMulPlan(ndtp.Layout(ndtp.Grid(x=2), None, 'x'), ndtp.Layout(ndtp.Grid(x=2), 'x', None)).volume((4, 4, 4))":
        set(),
    "command()": {"typer", "rich"},
    "command('--help')": set(),
    "command('--version')": set(),
    "command('bench', '--help')": set(),
    "command('check', '--help')": set(),
    "command('show', 'plan', '--grid', 'x=2', '--a', 'None x', '--b', 'x None')": set(),
    "command('show', 'layout', '--grid', 'x=2', '--layout', 'x', '--json', '-')": set(),
    "ndtp.plan(64, 8, 8, 4)[0].why": {"numpy"},
    "command('plan', '--tokens', '64', '--hidden', '8', '--ffn', '8', '--ranks', '4')": set(),
    "command('show', 'schedule', '--grid', 'x=2')": set(),
    "ndtp.nn.MLP, ndtp.parallelize, ndtp.CommMeter": {"torch", "torch.distributed"},
    "ndtp.testing.run": set(),
}  # fmt: skip
HEAVY = {
    *("numpy", "torch", "torch.distributed", "torch._dynamo", "torch._inductor", "triton"),
    *("ndtp_kernels", "transformers", "matplotlib", "typer", "rich", "hypothesis", "pytest"),
}
PROGRAM = """
import contextlib, io, json, sys

def command(*words):
    from ndtp.cli import main
    sys.argv = ["ndtp", *words]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main()

steps, heavy = json.loads(sys.argv[1])
for step in steps:
    exec(step)
    print(json.dumps(sorted(name for name in sys.modules if name in heavy or name.split(".")[0] == "ndtp")))
"""


def test_what_each_call_loads():
    arguments = [sys.executable, "-c", PROGRAM, json.dumps([list(STEPS), sorted(HEAVY)])]
    done = subprocess.run(arguments, check=False, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    loaded = [set(json.loads(line)) for line in done.stdout.splitlines()]
    assert loaded[0] == {"ndtp"}, "importing ndtp loads none of its parts"
    before, allowed = set(), set()
    for (step, needs), after in zip(STEPS.items(), loaded, strict=True):
        allowed |= needs
        assert after & HEAVY <= allowed, f"{step} loads {', '.join(sorted((after - before) & HEAVY))}"
        before = after
    assert allowed <= before, "what was to be seen was loaded"
