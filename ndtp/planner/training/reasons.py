"""The reasons for a split: what limits its step, and what the runners-up lose. Pure text."""

from __future__ import annotations

from ndtp.planner.fields import in_digits
from ndtp.planner.training.choose import GIB, SplitChoice

# What the parts of a step are, as a sentence says them.
PARTS = {
    "products": "the layers' products",
    "cores": "attention cores",
    "moved": "norms, activations, rotary embeddings and the loss, which memory bounds",
    "again": "recomputation in backward",
    "tensor": "collectives over x and y that are waited for",
    "weights": "weights that are gathered over z",
    "context": "keys and values over cp",
    "experts": "rows on their way to experts",
    "stages": "sends between stages",
    "data": "sums of gradients over replicas",
    "bubble": "stages that wait for their turn",
    "optimizer": "the optimizer",
    "host": "starting kernels",
}


def why(choice: SplitChoice) -> str:
    """Return the parts of a step, what limits it, and how much of the memory it needs."""
    time, total = choice.time.parts(), choice.seconds
    useful = sum(time[name] for name in ("products", "cores")) / total
    others = sorted(((time[name], name) for name in time if name not in ("products", "cores")), reverse=True)
    lost = [f"{part / total:.0%} to {PARTS[name]}" for part, name in others[:3] if part >= 0.01 * total]
    sentence = f"{useful:.0%} of a step multiplies" + (f"; it loses {', '.join(lost)}." if lost else ".")
    memory, room = float(choice.memory.total), choice.question.room
    parts = sorted(choice.memory.parts().items(), key=lambda item: -item[1])
    return f"{sentence} {_gib(memory)} of {_gib(room)} GiB a rank, most of it {parts[0][0]}."


def _gib(count: float) -> str:
    return f"{count / GIB:,.1f}" if count >= GIB else in_digits(count / GIB)


def limits(choice: SplitChoice) -> str:
    """Return the limit in a word: arithmetic, or the largest thing that is waited for."""
    time = choice.time.parts()
    names = ("tensor", "weights", "context", "experts", "stages", "data", "bubble", "host")
    waits = {name: time[name] for name in names}
    most = max(waits, key=lambda name: waits[name])
    if time["products"] + time["cores"] >= 0.6 * choice.seconds or waits[most] < time["moved"] + time["again"]:
        return "arithmetic" if time["products"] + time["cores"] >= time["moved"] else "memory bandwidth"
    return {"bubble": "pipeline bubble", "data": "gradient sums", "tensor": "tensor-parallel collectives"}.get(
        most, PARTS["host"] if most == "host" else most
    )


def against(best: SplitChoice, other: SplitChoice) -> str:
    """Return the part of the step in which a runner-up loses most against the best."""
    slower = other.seconds - best.seconds
    mine, theirs = best.time.parts(), other.time.parts()
    worst = max(mine, key=lambda name: theirs[name] - mine[name])
    if slower <= 0.01 * best.seconds:
        more = float(other.memory.total) - float(best.memory.total)
        return "as fast" + (f", {more / GIB:.1f} GiB more" if more > 0.05 * GIB else "")
    return f"{slower / best.seconds:.1%} slower: {(theirs[worst] - mine[worst]) / best.seconds:.1%} more for {worst}"
