"""Draw `grid.svg`: who holds what of A, B and C in the 3D scheme on a 2x2x2 grid.

    python docs/grid_picture.py

Ranks and blocks come from `ndtp.Layout`, so that the picture cannot disagree with the library.
"""

from pathlib import Path

import ndtp

RANK = 5  # the one whose product is shown
INK, PALE, SOFT = "#1f2933", "#e4e7eb", "#f5f7fa"
COLOURS = {"x": "#d9480f", "y": "#2b8a3e", "z": "#1864ab"}
OWN, TINT = "#ffd43b", "#fff3bf"
FONT = "font-family='Helvetica, Arial, sans-serif'"
CELL_W, CELL_H = 62, 40

grid = ndtp.Grid(z=2, x=2, y=2)
plan = ndtp.MatMulPlan(ndtp.Layout.parse(grid, "(z y) x"), ndtp.Layout.parse(grid, "(x z) y"))


def text(x: float, y: float, words: str, size: int = 15, colour: str = INK, **more: str) -> str:
    style = "".join(f" {key.replace('_', '-')}='{value}'" for key, value in more.items())
    place = f"x='{x:g}' y='{y:g}' text-anchor='middle'"
    return f"<text {place} {FONT} font-size='{size}' fill='{colour}'{style}>{words}</text>"


def named(tensor: str, layout: ndtp.Layout, letters: str) -> str:
    """`A[M_zy, K_x]`, with subscripts that are coloured as the axes of the cube."""
    words = f"{tensor}["
    for letter, axes, after in zip(letters, layout.dims, (", ", "]"), strict=True):
        marks = "".join(f"<tspan fill='{COLOURS[axis]}'>{axis}</tspan>" for axis in axes)
        words += f"{letter}<tspan dy='5' font-size='14'>{marks}</tspan><tspan dy='-5'>{after}</tspan>"
    return words


def matrix(left: float, top: float, tensor: str, layout: ndtp.Layout, letters: str, peers: set[int], note: str) -> str:
    """A table of blocks, each with the rank that holds it; `peers` are tinted and framed together."""
    rows, columns = (layout.num_splits(dim) for dim in (0, 1))
    parts, framed = [], []
    for rank in range(grid.num_ranks):
        row, column = (part.start for part in layout.slices(rank, (rows, columns)))
        x, y = left + column * CELL_W, top + row * CELL_H
        fill = OWN if rank == RANK else TINT if rank in peers else "white"
        parts.append(f"<rect x='{x}' y='{y}' width='{CELL_W}' height='{CELL_H}' fill='{fill}' stroke='#9aa5b1'/>")
        weight = {"font_weight": "bold"} if rank in peers else {}
        parts.append(text(x + CELL_W / 2, y + CELL_H / 2 + 6, str(rank), 17, **weight))
        if rank in peers:
            framed.append((x, y))
    x, y = min(x for x, _ in framed), min(y for _, y in framed)
    width = max(x for x, _ in framed) + CELL_W - x
    height = max(y for _, y in framed) + CELL_H - y
    axis = note[-1]
    parts.append(
        f"<rect x='{x}' y='{y}' width='{width}' height='{height}' fill='none' stroke='{COLOURS[axis]}' "
        "stroke-width='3.5' rx='3'/>"
    )
    centre = left + columns * CELL_W / 2
    parts.append(text(centre, top - 16, named(tensor, layout, letters), 19, font_weight="bold"))
    parts.append(text(centre, top + rows * CELL_H + 27, note, 15, COLOURS[axis], font_weight="bold"))
    return "".join(parts)


def cube(left: float, top: float, side: float, depth: float) -> str:
    """The ranks as the corners of a cube: x to the right, y downwards, z into the page."""

    def corner(rank: int) -> tuple[float, float]:
        at = grid.coordinate(rank)
        return left + at["x"] * side + at["z"] * depth, top + at["y"] * side - at["z"] * depth * 0.72

    edges, dots = [], []
    for rank in sorted(range(grid.num_ranks), key=lambda rank: -grid.coordinate(rank)["z"]):
        for axis in grid:
            for peer in grid.group(rank, (axis,)):
                if peer > rank:
                    (x1, y1), (x2, y2) = corner(rank), corner(peer)
                    wide = 4.5 if RANK in (rank, peer) else 1.6
                    edges.append(
                        f"<line x1='{x1:g}' y1='{y1:g}' x2='{x2:g}' y2='{y2:g}' stroke='{COLOURS[axis]}' "
                        f"stroke-width='{wide}'/>"
                    )
        x, y = corner(rank)
        fill = OWN if rank == RANK else TINT if any(rank in grid.group(RANK, (a,)) for a in grid) else "white"
        dots.append(f"<circle cx='{x:g}' cy='{y:g}' r='17' fill='{fill}' stroke='{INK}' stroke-width='1.5'/>")
        dots.append(text(x, y + 6, str(rank), 17, font_weight="bold" if rank == RANK else "normal"))
    x0, y0 = left - 8, top + side + 52
    names = "".join(f"<tspan fill='{COLOURS[axis]}' font-weight='bold'>{axis}</tspan>=2&#160;&#160;" for axis in grid)
    return "".join(edges + dots) + text(x0 + 98, y0, names, 17)


def picture() -> str:
    top, lefts = 88, (300, 506, 712)
    middle = top + 2 * CELL_H + 7
    letters = ("MK", "KN", "MN")
    notes = ("all-gather over y", "all-gather over z", "reduce-scatter over x")
    tensors = zip("ABC", lefts, (plan.a, plan.b, plan.out), letters, notes, strict=True)
    parts = [
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 24 880 312' role='img'>",
        "<title>The 3D scheme on a 2x2x2 grid: which rank holds which block</title>",
        f"<rect y='24' width='880' height='312' rx='10' fill='{SOFT}' stroke='{PALE}'/>",
        cube(56, 118, 110, 78),
    ]
    for tensor, left, layout, dims, note in tensors:
        peers = set(grid.group(RANK, (note[-1],)))
        parts.append(matrix(left, top, tensor, layout, dims, peers, note))
    for left, sign in zip(lefts[1:], ("&#183;", "&#8594;"), strict=True):
        parts.append(text(left - (206 - 2 * CELL_W) / 2, middle, sign, 30))
    legend = f"Numbers are ranks. Framed: what rank {RANK} multiplies (A, B), and the partial sum it shares (C)."
    parts.append(text(440, 314, legend, 14, "#52606d"))
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("grid.svg").write_text(picture())
