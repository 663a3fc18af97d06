"""The words of the house: docstrings are sentences, and one name means one thing.

A docstring begins with a sentence that has a subject and ends with a period: a noun phrase for a thing ("The operands
that leave this rank."), an imperative for a function ("Return the shard.").  It stands alone: words that need a
sentence before them ("Those that go.", "The same, one step on.", "Of a rank.") do not begin it.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_house import HOUSES, KERNELS, NDTP, House, modules, path_of

ROOT = Path(__file__).resolve().parents[1]

# Packages and modules whose docstrings are all rewritten.  The others may only become fewer.
REWRITTEN = (
    "ndtp.errors", "ndtp.dtypes", "ndtp.algebra", "ndtp.compute", "ndtp.schedule", "ndtp.ops", "ndtp.nn",
    "ndtp.planner", "ndtp.pipelines", "ndtp.measure", "ndtp.testing", "ndtp_kernels",
)  # fmt: skip

# First words that lean on a sentence that is not there: pronouns, prepositions, and clauses without a main clause.
LEANING_WORDS = (
    "What Of How Where As Which Those These In Why By That For With Who Whose Into From At On After Over Along Until "
    "Without To Beside Behind Beyond Among Again Also And Or But So Such It Its They If When While Once Else Otherwise "
    "Whatever Whoever Wherever Then Not Only Like Than Through Under Between Before Within Across Together Ones Here "
    "There Meanwhile Raises: Args: Returns: Attributes:"
)
LEANING = set(LEANING_WORDS.split())
BEGINS_BADLY = re.compile(
    r"The (same|one|ones|others|rest|like|former|latter)\b"
    r"|One (that|of|which|whose|who|by|in|on|with|for|after|more|way)\b"
    r"|[^A-Za-z`\"'\d(<]|[a-z]+ "
)

# Names of classes and types that still mean several things, and how many.  A name leaves this list when its other
# things are renamed; none may join it.
TWO_MEANINGS: dict[str, int] = {
    "Activation": 2, "Arithmetic": 2, "Axes": 2, "Between": 2, "Call": 4, "Candidate": 2, "Case": 3,
    "Choice": 3, "Cut": 2, "Entry": 3, "Exchange": 2, "Form": 2, "Groups": 2, "Job": 5, "Key": 3, "Letters": 2,
    "Memory": 3, "Message": 2, "OfHeads": 2, "Part": 2, "Passage": 2, "Point": 2, "Product": 3, "Projection": 2,
    "Record": 2, "Request": 2, "Result": 2, "Rule": 2, "Run": 2, "Shape": 5, "Slots": 2, "Span": 2, "Spec": 2,
    "Split": 2, "Stored": 2, "Table": 2, "Task": 2, "Watch": 2, "Way": 3, "Work": 2,
}  # fmt: skip


def fault(docstring: str) -> str:
    """Return what is wrong with the first paragraph of a docstring, or ""."""
    first = docstring.split("\n\n")[0]
    word = first.split()[0]
    if word in LEANING or word.rstrip(",:;") in LEANING or BEGINS_BADLY.match(first):
        return f"begins with {' '.join(first.split()[:2])!r}, which leans on a sentence that is not there"
    if first.rstrip()[-1] not in ".:?!":
        return "does not end with a period"
    return ""


def documented(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the name and the docstring of a module, and of all classes and functions in it."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node)
            if docstring:
                yield getattr(node, "name", "the module"), docstring


def is_rewritten(module: str) -> bool:
    return any(f"{module}.".startswith(f"{name}.") for name in REWRITTEN)


@HOUSES
def test_docstrings_begin_with_a_sentence(house: House):
    wrong = [
        f"{path_of(module).relative_to(ROOT)}: {name} {found}"
        for module, tree in modules(house).items()
        if is_rewritten(module)
        for name, docstring in documented(tree)
        if (found := fault(docstring))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("docstring", "is_good"),
    [
        ("Those that go.", False),
        ("The same, one step on.", False),
        ("Of a rank.", False),
        ("Raises:\n    LayoutError: a size.", False),
        ("[rows, K] -> [rows, N]", False),
        ("Return the shard", False),
        ("The operands that leave this rank, in the order in which they are sent.", True),
        ("One step of a tensor.", True),
        ("`ndtp check`: every grid against dense.", True),
        ("Return [3, rows] of statistics.\n\nArgs:\n    x: [rows, K]", True),
    ],
)
def test_faults_are_told_from_sentences(docstring: str, is_good: bool):
    assert bool(fault(docstring)) is not is_good


def named(tree: ast.Module) -> Iterator[str]:
    """Yield the capitalised names that a module defines at its top: classes, and names of types."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = [node.target.id]
        else:
            names = []
        yield from (name for name in names if re.fullmatch(r"[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*", name))


def test_one_name_means_one_thing():
    """No two modules define the same capitalised name, but for those on the list, which may only become shorter."""
    places: dict[str, list[str]] = defaultdict(list)
    for house in (NDTP, KERNELS):
        for module, tree in modules(house).items():
            for name in set(named(tree)):
                places[name].append(module)
    found = {name: where for name, where in places.items() if len(where) > 1 and name != "Self"}
    joined = {name: where for name, where in found.items() if len(where) > TWO_MEANINGS.get(name, 1)}
    assert not joined, f"one name for several things, choose another: {joined}"
    gone = set(TWO_MEANINGS) - set(found)
    assert not gone, f"take off the list: {sorted(gone)}"
