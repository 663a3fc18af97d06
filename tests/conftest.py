import gc
import importlib
import json
import os
import warnings
from collections.abc import Iterator

import pytest
from turns import COSTS, TURN, left_out, settle_turn

# What takes longest comes first: at the end a worker would wait for the other one's last file.
LONGEST = (
    "test_aot.py", "test_interpreter.py", "test_bench_programs.py", "test_failures.py", "test_launch.py",
    "test_docs.py", "test_compile.py", "test_mlp.py",
)  # fmt: skip
FEW = 10  # files, of which perhaps none compiles
# What torch imports when a function is first compiled.
LATE = ("torch._inductor.compile_fx", "torch.distributed.tensor.experimental")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all is imported, of which nothing is garbage: a tenth of the time that it takes
    settle_turn(names_tests=config.args_source is pytest.Config.ArgsSource.ARGS)
    config.option.loadscopereorder = False  # pytest-xdist would take the files with the most tests first
    # Who only hands out tests has no ranks, and imports no torch.
    if config.getoption("dist", "no") == "no" or hasattr(config, "workerinput"):
        config.pluginmanager.import_plugin("ndtp.testing.pytest_plugin")


def pytest_report_header() -> str:
    return f"turn of the tests that take turns: {os.environ[TURN]} (NDTP_TURN=all runs all of them)"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    others = left_out(json.loads(COSTS.read_text()))
    for kind, devices in {"cpu": ("cuda", "emulated"), "real": ("emulated",)}.items():
        if os.environ.get("NDTP_TEST_DEVICE") in devices:
            others |= {item.nodeid for item in items if item.get_closest_marker(kind)}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in others])
    items[:] = [item for item in items if item.nodeid not in others]
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported so far stays: no collection of garbage need look at it again."""
    if len({item.path for item in session.items}) > FEW:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch finds deprecated in itself
            for name in LATE:  # ranks find it imported then: twenty compile
                importlib.import_module(name)
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="module", autouse=True)
def _ranks_end_with_their_file() -> Iterator[None]:
    """Ranks that idle take a tenth of a core: gloo's threads wake a hundred times a second.  New ones start as fast."""
    from ndtp.testing.pool import close_shared_pools

    yield
    close_shared_pools()
