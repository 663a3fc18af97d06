"""One house: which part may import which, read off the syntax trees of all of them; imports for types alone included.

Nothing is imported here, so a circle that happens to work is found as well.
"""

from __future__ import annotations

import ast
import pkgutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
LONGEST_FILE, LONGEST_FUNCTION = 400, 60

# What a floor stands on.  It may import these, what they stand on, and itself.
FLOORS: dict[str, tuple[str, ...]] = {
    "errors": (),
    "dtypes": (),
    "algebra": ("errors", "dtypes"),
    "schedule": ("algebra",),
    "planner": ("schedule",),
    "compute": ("errors", "dtypes"),
    "collectives": ("algebra", "compute"),
    "runtime": ("collectives", "compute", "schedule"),
    "ops": ("runtime",),
    "nn": ("ops",),
    "split": ("nn",),
    "models": ("split", "planner"),
    "checkpoints": ("models",),
    "pipelines": ("checkpoints",),
    "integrations": ("checkpoints",),
    "measure": ("models",),
    "testing": ("runtime",),
    "": ("pipelines", "integrations", "testing", "measure"),  # the front door, ndtp/__init__.py
    "cli": ("",),
    "__main__": ("cli",),
}
KERNEL_FLOORS: dict[str, tuple[str, ...]] = {
    "errors": (),
    "reference": (),
    "tracing": (),
    "operands": ("errors",),
    "choice": ("errors",),
    "triton_code": (),
    "form": ("choice", "operands", "reference"),
    "call": ("form",),
    "launch": ("call", "triton_code"),
    "checks": ("errors",),
    "torch_path": ("form",),
    "signals": ("triton_code",),
    "prepared": ("launch",),
    "grouped": ("launch", "tracing", "checks"),
    "reductions": ("prepared", "checks", "torch_path", "tracing"),
    "products": ("reductions",),
    "interface": ("products",),
    "": ("grouped", "interface"),
    "tools": ("",),
    "aot": ("tools",),  # the door of `python -m ndtp_kernels.aot`
}
FORBIDDEN = {("nn", "collectives")}  # modules move nothing themselves: they call ops
# Whole libraries that a floor does without, so that it runs where there is no process group, no GPU, no torch.
WITHOUT = {
    "algebra": ("torch.distributed", "triton"),
    "schedule": ("torch", "triton"),
    "planner": ("torch", "triton"),
    "compute": ("torch.distributed",),
    "nn": ("torch.distributed",),
}

# Imports that are still to be undone, and files to be cut.  What is mended must leave these lists, too.
TIES: set[str] = set()
TOO_LONG: set[str] = set()
# Kernels are one function each; the others have a signature, and its description, of as many options.
LONG_FUNCTIONS = {
    "ndtp.cli.plan.plan", "ndtp.cli.train.train", "ndtp.models.parallelize.parallelize", "ndtp.planner.search.plan",
    "ndtp_kernels.triton_code.gemm.gemm_kernel",
    "ndtp_kernels.triton_code.grouped.grouped_outer_kernel", "ndtp_kernels.triton_code.grouped.grouped_rows_kernel",
}  # fmt: skip


class Import(NamedTuple):
    """One import of one module by another, and the line where it stands."""

    module: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"{self.module} -> {self.imported}"

    @property
    def where(self) -> str:
        return f"{path_of(self.module).relative_to(ROOT)}:{self.line}: imports {self.imported}"


@dataclass(frozen=True, eq=False)
class House:
    package: str
    folder: Path
    floors: Mapping[str, tuple[str, ...]]


NDTP = House("ndtp", ROOT / "ndtp", FLOORS)
KERNELS = House("ndtp_kernels", ROOT / "kernels" / "ndtp_kernels", KERNEL_FLOORS)
HOUSES = pytest.mark.parametrize("house", [NDTP, KERNELS], ids=lambda house: house.package)


def path_of(module: str) -> Path:
    house = KERNELS if module.split(".")[0] == "ndtp_kernels" else NDTP
    path = house.folder.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def modules(house: House) -> dict[str, ast.Module]:
    """All modules of a house by their names; a package is its `__init__`."""
    found = {}
    for path in sorted(house.folder.rglob("*.py")):
        parts = path.relative_to(house.folder).with_suffix("").parts
        name = ".".join([house.package, *(part for part in parts if part != "__init__")])
        found[name] = ast.parse(path.read_text())
    return found


def names_of(node: ast.AST) -> Iterator[str]:
    """What a node imports: modules, or members of modules, which may be modules themselves."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert not node.level and node.module, "imports are written out in full"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
        yield from (word.value for word in node.args[:1] if isinstance(word, ast.Constant))


@cache
def nodes(house: House) -> dict[str, list[ast.AST]]:
    """All nodes of all modules; a walk takes longer than what is looked for in it."""
    return {module: list(ast.walk(tree)) for module, tree in modules(house).items()}


@cache
def imports(house: House) -> list[Import]:
    """Of modules of the house by modules of the house."""
    known = modules(house)
    found = set()
    for module, found_in in nodes(house).items():
        for node in found_in:
            for name in names_of(node):
                imported = name if name in known else name.rpartition(".")[0]
                if imported in known and imported != module:
                    found.add(Import(module, imported, node.lineno))
    return sorted(found)


def floor_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def stands_on(floor: str, floors: Mapping[str, tuple[str, ...]]) -> set[str]:
    below = set(floors[floor])
    return below.union(*(stands_on(each, floors) for each in below)) if below else below


def is_upward(each: Import, house: House) -> bool:
    floor, imported = floor_of(each.module), floor_of(each.imported)
    if floor == imported:
        return False
    return imported not in stands_on(floor, house.floors) or (floor, imported) in FORBIDDEN


def circle(edges: list[Import]) -> list[Import]:
    """The imports along one circle, a shortest one; empty if there is none."""
    following: dict[str, list[Import]] = {}
    for each in edges:
        following.setdefault(each.module, []).append(each)
    best: list[Import] = []
    for start in sorted(following):
        ways: dict[str, list[Import]] = {start: []}
        queue = [start]
        for module in queue:
            for each in following.get(module, []):
                if each.imported == start:
                    way = [*ways[module], each]
                    if not best or len(way) < len(best):
                        best = way
                elif each.imported not in ways:
                    ways[each.imported] = [*ways[module], each]
                    queue.append(each.imported)
    return best


def without(edges: list[Import], ties: set[str]) -> list[Import]:
    return [each for each in edges if str(each) not in ties]


@HOUSES
def test_imports_lead_downwards(house):
    wrong = [each.where for each in without(imports(house), TIES) if is_upward(each, house)]
    assert not wrong, "imports that lead upwards:\n" + "\n".join(wrong)


@HOUSES
def test_no_circles(house):
    found = circle(without(imports(house), TIES))
    assert not found, "modules that import each other in a circle:\n" + "\n".join(each.where for each in found)


def test_ties_are_still_there():
    """A tie is an import that leads upwards, or closes a circle which no other tie is part of."""
    for tie in sorted(TIES):
        house = KERNELS if tie.startswith("ndtp_kernels") else NDTP
        edges = without(imports(house), TIES - {tie})
        there = [each for each in edges if str(each) == tie]
        is_foreign = any(str(each) == tie for each in foreign_imports())
        assert there or is_foreign, f"{tie} is mended: take it off the list"
        harms = is_foreign or is_upward(there[0], house) or circle(edges)
        assert harms, f"{tie} does no harm any more: take it off the list"


@pytest.mark.parametrize("floor", WITHOUT)
def test_floors_do_without(floor):
    """At the top of a module, that is: what a function imports is needed where it is called."""
    wrong = [each.where for each in without(foreign_imports(), TIES) if floor_of(each.module) == floor]
    assert not wrong, f"{floor} does without {', '.join(WITHOUT[floor])}:\n" + "\n".join(wrong)


@cache
def foreign_imports() -> list[Import]:
    """Of libraries that a floor is to do without."""
    found = []
    for module, tree in modules(NDTP).items():
        for node in tree.body:
            for name in names_of(node):
                for library in WITHOUT.get(floor_of(module), ()):
                    if f"{name}.".startswith(f"{library}."):
                        found.append(Import(module, library, node.lineno))
    return found


BACKENDS = ("gloo", "nccl", "fake")


def test_backends_are_named_in_their_records_alone():
    """Elsewhere code asks the record what the backend can do, so that another backend is another record."""
    wrong = []
    for module, found in nodes(NDTP).items():
        for node in found:
            if isinstance(node, ast.Constant) and node.value in BACKENDS and module != "ndtp.collectives.backends":
                wrong.append(f"{path_of(module).relative_to(ROOT)}:{node.lineno}: {node.value!r}")
    assert not wrong, "\n".join(wrong)


def is_of_torch(node: ast.AST, from_torch: set[str]) -> bool:
    """Whether a chain of attributes, such as `c10d.GroupMember.WORLD`, begins with what was imported from torch."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return isinstance(node, ast.Name) and node.id in from_torch


CHANGING = {"add", "append", "clear", "discard", "extend", "insert", "pop", "remove", "update", "add_safe_globals"}


def changed_by(node: ast.AST) -> list[ast.AST]:
    """What a statement or a call changes in its place."""
    if isinstance(node, (ast.Assign, ast.Delete)):
        return node.targets
    if isinstance(node, ast.AugAssign):
        return [node.target]
    func = getattr(node, "func", None)  # of a call
    if getattr(func, "id", "") in ("setattr", "delattr"):
        return [ast.Attribute(node.args[0], "")]
    is_changing = isinstance(func, ast.Attribute) and func.attr in CHANGING
    return [func] if is_changing and ast.unparse(func) != "torch.add" else []  # which is a sum


def test_what_is_patched_in_torch_is_listed():
    """Nothing but `torch_patches` changes what is torch's; this torch has all that is listed there."""
    from ndtp.collectives import torch_patches

    wrong = []
    for module, found in nodes(NDTP).items():
        imported = [node for node in found if isinstance(node, (ast.Import, ast.ImportFrom))]
        names = [
            alias.asname or alias.name.partition(".")[0]
            for node in imported
            for alias in node.names
            if (getattr(node, "module", None) or alias.name).partition(".")[0] == "torch"
        ]
        for node in found:
            targets = [each for each in changed_by(node) if isinstance(each, (ast.Attribute, ast.Subscript))]
            if any(is_of_torch(each, set(names)) for each in targets):
                wrong.append(f"{path_of(module).relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert not wrong, "\n".join(wrong)
    for target, patch in torch_patches.PATCHES.items():
        is_skipped = "_dynamo" in target or "save_inputs" in target  # an import of seconds; torch 2.11 has none
        is_there = is_skipped or pkgutil.resolve_name(target) is not None
        assert is_there and patch.why and patch.until


def test_nothing_lies_about():
    files = {"__init__.py", "__main__.py", "errors.py", "dtypes.py", "py.typed"}
    packages = set(FLOORS) - {"errors", "dtypes"}
    for path in NDTP.folder.iterdir():
        if path.name == "__pycache__":
            continue
        allowed = packages if path.is_dir() else files
        assert path.name in allowed, f"{path.relative_to(ROOT)}: ndtp/ holds {', '.join(sorted(files | packages))}"


def test_files_are_one_sitting_long():
    long = set()
    for folder in ("ndtp", "kernels", "tests", "bench", "docs"):
        for path in (ROOT / folder).rglob("*.py"):
            if len(path.read_text().splitlines()) > LONGEST_FILE:
                long.add(str(path.relative_to(ROOT)))
    assert long == TOO_LONG, f"more than {LONGEST_FILE} lines"


def test_functions_fit_on_a_screen():
    long = set()
    for house in (NDTP, KERNELS):
        for module, found in nodes(house).items():
            functions = [node for node in found if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
            long |= {f"{module}.{f.name}" for f in functions if f.end_lineno - f.lineno >= LONGEST_FUNCTION}
    assert long == LONG_FUNCTIONS, f"more than {LONGEST_FUNCTION} lines"


def test_documented_paths_lead_to_the_same_modules():
    """A module that was documented before there were packages has its old path, too, and is not loaded twice."""
    import importlib

    import ndtp

    for old, new in ndtp._MOVED.items():
        module = importlib.import_module(f"ndtp.{old}")
        assert module is importlib.import_module(f"ndtp.{new}") is getattr(ndtp, old)
        assert module.__name__ == module.__spec__.name == f"ndtp.{new}"


def test_no_module_is_named_like_a_function():
    """`import ndtp.matmul` must not give a function."""
    import ndtp

    for name in ndtp.__all__:
        assert f"ndtp.{name}" not in modules(NDTP) and name not in ndtp._MOVED, name


EXECUTES = ("eval", "exec", "os.system", "os.popen", "tempfile.mktemp")
PICKLES = {
    "ndtp.checkpoints.old_folders",  # reads those of earlier versions, and executes nothing of them
    "ndtp.measure.torch_flights",  # writes them for torch's analyser, and reads none
}
UNPICKLES = ("pickle.load", "pickle.loads")


@HOUSES
def test_nothing_that_is_read_is_executed(house):
    """See docs/security.md.  Parents and ranks of `ndtp.testing` are one program."""
    wrong = []
    for module, of_module in nodes(house).items():
        for node in of_module:
            found = ""
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                is_pickle = "pickle" in [name.split(".")[0] for name in names_of(node)]
                found = "pickle" if is_pickle and module not in PICKLES and floor_of(module) != "testing" else ""
            elif isinstance(node, ast.Call):
                owner = getattr(node.func, "value", None)  # of a method, which is another thing
                called = getattr(node.func, "id", f"{getattr(owner, 'id', '')}.{getattr(node.func, 'attr', '')}")
                given = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
                refused = EXECUTES if floor_of(module) == "testing" else (*EXECUTES, *UNPICKLES)
                if called in refused or given.get("shell") is True:
                    found = called
                elif called == "torch.load" and given.get("weights_only") is not True:
                    found = "torch.load without weights_only"
            if found:
                wrong.append(f"{path_of(module).relative_to(ROOT)}:{node.lineno}: {found}")
    assert not wrong, "\n".join(wrong)


def test_the_first_hour_on_a_device_runs_every_test_that_wants_one():
    command = (ROOT / "bench" / "first_device.sh").read_text()
    marked = [path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()]
    left_out = {str(path.relative_to(ROOT)) for path in marked} - set(command.split())
    assert left_out - {str(Path(__file__).relative_to(ROOT))} == set()
    listed = subprocess.run(
        ["bash", "bench/first_device.sh", "--list"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    steps = {line.split()[0]: line for line in listed.stdout.splitlines()}
    assert len(steps) > 15 and sum(int(line.split()[1]) for line in steps.values()) <= 55 * 60
    assert "--seconds" in steps["suite"] and list(steps).index("suite") < 3 and {"beside", "planner"} <= set(steps)
