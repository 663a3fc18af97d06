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
    "ndtp.planner", "ndtp.pipelines", "ndtp.measure", "ndtp.testing", "ndtp.collectives", "ndtp.checkpoints",
    "ndtp.cli", "ndtp.runtime", "ndtp.split", "ndtp.models", "ndtp_kernels",
)  # fmt: skip

# Uses of the word `Any` in the code of ndtp.  They may only become fewer.
MOST_ANY = 2461

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
    r"|[^A-Za-z`\"'\d(<]|(?!torch |ndtp )[a-z]+ "
)


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


def named(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the capitalised names at the top of a module, and what each is: a class, or the text of a type."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield node.name, "class"
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if re.fullmatch(r"[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*", name) and name != "Self":
                yield name, ast.unparse(node.value)


def test_one_name_means_one_thing():
    """No two modules define the same name, but for types that are spelt alike."""
    places: dict[str, dict[str, str]] = defaultdict(dict)
    for house in (NDTP, KERNELS):
        for module, tree in modules(house).items():
            for name, meaning in named(tree):
                if not name.startswith("_"):
                    places[name][module if meaning == "class" else meaning] = module
    found = {name: sorted(where.values()) for name, where in places.items() if len(where) > 1}
    assert not found, f"one name for several things, choose another: {found}"


def test_any_is_said_less_and_less():
    """What takes anything is an `object`; what torch hands over has names in `ndtp.compute.torch_calls`."""
    count = sum(len(re.findall(r"\bAny\b", path.read_text())) for path in NDTP.folder.rglob("*.py"))
    assert count <= MOST_ANY, f"{count} uses of `Any`, of which there were {MOST_ANY}: name a type"
    assert count > MOST_ANY - 20, f"{count} uses of `Any` are left: lower MOST_ANY"
