"""README and docs: every example runs, every printed result is what it prints, every table what the library computes.

In the Markdown, a ```python block is a file that a user could save and run; `<!-- continues -->` before it joins it to
the block before.  A ```text block is what the block before it prints (`...` stands for anything).  A block after
`<!-- not run: why -->` is only compiled.
"""

import contextlib
import doctest
import importlib
import io
import json
import re
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from launched import launch

import ndtp
from ndtp.algebra.schemes import block_layouts

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(
    r"(?:<!-- (?P<mark>[^>\n]*) -->\n+)?^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)
GUARD = 'if __name__ == "__main__":'
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
BETWEEN = "\x00"  # printed between the blocks of one script, to tell their results apart


@dataclass
class Block:
    page: Path
    line: int
    source: str
    expected: str | None = None


@dataclass
class Script:
    """Blocks that continue one another: one file."""

    name: str
    blocks: list[Block] = field(default_factory=list)
    runs: bool = True

    @property
    def source(self) -> str:
        return f"\n{GUARD}\n    print(end={BETWEEN!r})\n".join(block.source for block in self.blocks)

    def __str__(self) -> str:
        block = self.blocks[0]
        return f"{block.page.name}:{block.line}"


def scripts_of(page: Path) -> list[Script]:
    text = page.read_text()
    scripts: list[Script] = []
    for match in FENCE.finditer(text):
        mark = match["mark"] or ""
        if match["language"] == "text" and scripts:
            scripts[-1].blocks[-1].expected = match["body"]
        elif match["language"] == "python":
            block = Block(page, text[: match.start("body")].count("\n") + 1, match["body"])
            if mark != "continues":
                scripts.append(
                    Script(f"example_{page.stem.lower()}_{len(scripts)}", runs=not mark.startswith("not run"))
                )
            scripts[-1].blocks.append(block)
    return scripts


SCRIPTS = [script for page in PAGES for script in scripts_of(page)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where examples are saved, so that ranks can import them."""
    path = tmp_path_factory.mktemp("docs")
    sys.path.insert(0, str(path))
    yield path
    sys.path.remove(str(path))


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script.runs], ids=str)
def test_example(script, folder, monkeypatch):
    """Run as a module, so that all examples share one pool of ranks: the guard holds here and fails in the ranks."""
    path = folder / f"{script.name}.py"
    path.write_text(script.source)
    module = types.ModuleType(script.name)
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, script.name, module)
    monkeypatch.chdir(folder)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), torch.random.fork_rng():
        exec(compile(script.source.replace(GUARD, "if True:"), path, "exec"), module.__dict__)
    for block, got in zip(script.blocks, printed.getvalue().split(BETWEEN), strict=True):
        want = block.expected
        where = f"{block.page.name}:{block.line}"
        if want is None:
            assert not got.strip(), f"{where} prints what the page does not show:\n{got}"
        else:
            assert doctest.OutputChecker().check_output(want, got, FLAGS), f"{where} printed\n{got}\nnot\n{want}"


@pytest.mark.parametrize("script", [script for script in SCRIPTS if not script.runs], ids=str)
def test_example_compiles(script):
    compile(script.source, str(script), "exec")


@pytest.mark.parametrize("page, said", [("README.md", "init_process_group"), ("docs/trainer.md", "GridStrategy")])
def test_torchrun_example(ranks, tmp_path, page, said):
    """Training scripts, as torchrun starts them, on two ranks."""
    script = next(script for script in scripts_of(ROOT / page) if said in script.source)
    path = tmp_path / "train.py"
    path.write_text(script.source)
    printed, nothing = launch(ranks(2), path)
    assert not nothing
    losses = [float(line.split()[-1]) for line in printed.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0]


def new_sides() -> dict[str, str]:
    """Return the program that each diff of docs/coming-from.md leads to, by the heading above it."""
    text = (ROOT / "docs" / "coming-from.md").read_text()
    found = {}
    for part in text.split("\n## ")[1:]:
        body = re.search(r"^```diff\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)
        assert body, f"{part.splitlines()[0]}: no diff"
        found[part.splitlines()[0]] = "".join(
            line[1:] + "\n" for line in body[1].splitlines() if not line.startswith("-")
        )
    return found


def run_new_sides(programs: dict[str, str]) -> None:
    for heading, source in programs.items():
        exec(compile(source, heading, "exec"), {})


def test_programs_that_other_libraries_lead_to(ranks):
    programs = new_sides()
    assert len(programs) == 7
    ranks(4).run(run_new_sides, programs)


# ------------------------------------------------------------------------------------------------------------- tables


def product(grid: ndtp.Grid, a: str, b: str) -> ndtp.MatMulPlan:
    return ndtp.MatMulPlan(ndtp.Layout.parse(grid, a), ndtp.Layout.parse(grid, b))


def of_scheme(grid: ndtp.Grid, scheme: str, index: int) -> ndtp.MatMulPlan:
    """A product of a named scheme, with B as [K, N] instead of a weight's [N, K]."""
    plan = block_layouts(grid, scheme).plans()[index]
    return ndtp.MatMulPlan(plan.a, plan.b.with_dims(*reversed(plan.b.dims)), plan.out)


def scheme_rows() -> list[str]:
    line, plane, cube, rows = ndtp.Grid(x=8), ndtp.Grid(x=4, y=2), ndtp.Grid(z=2, x=2, y=2), ndtp.Grid(d=8)
    products = [
        ("1D column", "`1d`", of_scheme(line, "1d", 0)),
        ("1D row", "`1d`", of_scheme(line, "1d", 1)),
        ("1D column, sequence parallel", "`1d-sp`", of_scheme(line, "1d-sp", 0)),
        ("1D row, sequence parallel", "`1d-sp`", of_scheme(line, "1d-sp", 1)),
        ("2D row split", "`2d`", of_scheme(plane, "2d", 0)),
        ("2D feature split", "`2d-features`", of_scheme(plane, "2d-features", 0)),
        ("3D", "`3d`", of_scheme(cube, "3d", 0)),
        ("3D, second product", "`3d`", of_scheme(cube, "3d", 1)),
        ("data parallel", "", product(rows, "d None", "None None")),
        ("FSDP", "", product(rows, "d None", "d None")),
    ]
    result = []
    for name, scheme, plan in products:
        tensors = re.fullmatch(r"A(\[.*\]) \. B(\[.*\]) -> C(\[.*\])", plan.equation).groups()
        steps = ", ".join(str(step) for step in plan.steps if step.phase == "forward") or "none"
        result.append(f"| {name} | {scheme} | " + " | ".join(f"`{text}`" for text in tensors) + f" | {steps} |")
    return result


def volume_rows() -> list[str]:
    """MiB that each rank receives in the forward of one block in bf16, on the best grid of each scheme."""
    tokens, hidden, inner = 8192, 4096, 16384
    result = []
    for ranks in (4, 8, 16, 64):
        cells = []
        for scheme in ("1d", "2d", "3d"):
            volumes = []
            for grid in ndtp.Grid.all(ranks, ("z", "x", "y")):
                if grid["z"] > 1 if scheme == "2d" else scheme == "1d" and grid["x"] < ranks:
                    continue
                up, down = block_layouts(grid, scheme).plans()
                volume = up.volume((tokens, hidden, inner), "bf16") + down.volume((tokens, inner, hidden), "bf16")
                assert volume.backward == volume.forward
                volumes.append((volume.forward, max(grid.shape), str(grid)))  # of equal ones, the roundest grid
            best, _, grid = min(volumes)
            cells.append(f"{best / 2**20:g}" + f" ({grid})" * (scheme != "1d"))
        result.append(f"| {ranks} | " + " | ".join(cells) + " |")
    return result


def measured_rows() -> list[str]:
    """Steps of rivals and of ndtp as the records of the benches have them; quotients are the records' own steps'."""
    result = []

    def row(program: str, rate: str, rival: str, theirs: float, ours: float, grid: str) -> None:
        seconds = f"{theirs / 1e3:.2f} s | {ours / 1e3:.2f} s"
        result.append(f"| {program} | {rate} Mbit/s | {rival} | {seconds} | {grid} | {theirs / ours:.2f}x |")

    for rate in ("200", "500"):
        grids = json.loads((ROOT / f"bench/results/overlap-blocks-{rate}.json").read_text())["grids"]
        for key, rival, grid in (
            ("1d-sp:x=8", "torch", "1D x=8, as torch"),
            ("3d:dp=4,y=2", "torch", "dp=4 y=2"),
            ("3d:z=2,x=2,y=2", "AxoNN", "z=2 x=2 y=2, as AxoNN"),
            ("3d:z=4,x=1,y=2", "AxoNN", "z=4 y=2, as AxoNN"),
        ):
            steps = {name: found["step_ms"] for name, found in grids[f"{key} in 4 blocks"].items()}
            theirs = steps["torch sequence parallel" if rival == "torch" else "AxoNN 0.2.0, weights kept"]
            assert rival == "torch" or theirs < steps["AxoNN 0.2.0"]
            row("four MLP blocks", rate, rival, theirs, *(ms for name, ms in steps.items() if "auto" in name), grid)
        rows = json.loads((ROOT / "bench/results/whole_model.json").read_text())["runs"][f"{rate}mbit"]["rows"]
        (torchs, *_), (grid, _), (_, chunks) = ((name, found["step_ms"]) for name, found in rows.items())
        theirs = rows[torchs]["step_ms"]
        row("Llama of eight layers", rate, "torch", theirs, chunks, grid.removeprefix("ndtp ").replace(" x=1", ""))
    return result


def table(page: str, name: str) -> list[str]:
    """Rows below the header of the table that `<!-- table: name -->` marks."""
    text = (ROOT / page).read_text().split(f"<!-- table: {name} -->\n", 1)[1].lstrip("\n")
    lines = text[: text.index("\n\n")].splitlines()
    return lines[2:]


@pytest.mark.parametrize(
    ("page", "name", "rows"),
    [
        ("docs/algebra.md", "schemes", scheme_rows),
        ("docs/algebra.md", "volumes", volume_rows),
        ("README.md", "measured", measured_rows),
    ],
)
def test_table_is_what_the_library_computes_or_a_bench_recorded(page, name, rows):
    assert table(page, name) == rows()


# -------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_exist(page):
    for name in sorted(set(re.findall(r"\bndtp(?:\.[A-Za-z_]\w*)+", page.read_text()))):
        assert resolves(name), f"{page.name} names {name}, which does not exist"


def test_names_in_the_code_exist():
    """In docstrings and comments: what has moved since is said to be where it was."""
    wrong = []
    for path in [*(ROOT / "ndtp").rglob("*.py"), *(ROOT / "kernels").rglob("*.py"), *(ROOT / "bench").glob("*.py")]:
        for name in sorted(set(re.findall(r"`(ndtp(?:_kernels)?(?:\.[A-Za-z_]\w*)+)", path.read_text()))):
            if not resolves(name):
                wrong.append(f"{path.relative_to(ROOT)} names {name}")
    assert not wrong, "which does not exist:\n" + "\n".join(wrong)


def test_glossary_has_its_places():
    """Each term has a meaning that is a sentence, a place in the code that exists, and stands there once."""
    text = (ROOT / "docs" / "glossary.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    terms = [row for row in rows if row[0] != "term"]
    assert len(terms) >= 40 and len({row[0] for row in terms}) == len(terms)
    for term, meaning, place, *others in terms:
        assert meaning.endswith(".") and len(others) == 4, term
        assert place.startswith("`ndtp") and resolves(place.strip("`")), f"{term}: {place}"


def test_the_code_is_read_in_ten_files():
    text = (ROOT / "README.md").read_text().split("## Read the code in this order")[1].split("\n## ")[0]
    rows = [re.findall(r"\]\(([^)]+)\)", line) for line in text.splitlines() if line.startswith("| [")]
    files = [file for row in rows for file in row]
    assert len(files) <= 10 and all((ROOT / file).is_file() for file in files)


def resolves(name: str) -> bool:
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        try:
            for part in parts[count:]:
                found = getattr(found, part)
            return True
        except AttributeError:
            if not hasattr(found, "__dataclass_fields__"):
                continue
            return part in found.__dataclass_fields__
    return False


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", re.sub(FENCE, "", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page):
    text = re.sub(FENCE, "", page.read_text())
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src(?:set)?="([^"]+)"', text)
    for target in targets:
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name} links to {target}; no such heading"
