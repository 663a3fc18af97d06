"""All interleavings of what the partitions of a Gluon kernel were seen to do in `emulated`.

What a partition does, and in which order, depends on no other one and on no value: one run of a kernel shows it all.
"""


def explore(traces, counts, limit=2_000_000):
    """All interleavings of what the partitions of a program do, copies landing at any time; the number of states.

    Args:
        traces: partition -> its operations.
        counts: barrier -> arrivals of a phase.

    Raises:
        AssertionError: a wait that nothing ends, an operand that is written while it is read, or different data read.
    """
    names = list(traces)
    barriers = sorted(counts)
    number = {name: at for at, name in enumerate(barriers)}
    none: frozenset = frozenset()
    start = (tuple(0 for _ in names), tuple((0, counts[name], 0) for name in barriers), none, none, none, ())
    seen, queue = {start}, [start]

    def change(state, name, arrivals, num_bytes):
        state = list(state)
        phase, pending, expected = state[number[name]]
        pending, expected = pending - arrivals, expected + num_bytes
        assert pending >= 0, f"{name}: more arrivals than a phase has"
        # Only the parity is ever asked for.
        state[number[name]] = (phase ^ 1, counts[name], 0) if pending == expected == 0 else (phase, pending, expected)
        return tuple(state)

    reads = {}
    while queue:
        at, state, flying, reading, held, commits = queue.pop()
        found = []
        for task, name in enumerate(names):
            if at[task] == len(traces[name]):
                continue
            kind, *what = traces[name][at[task]]
            after = (state, flying, reading, held, commits)
            if kind == "wait":
                if state[number[what[0]]][0] == what[1]:
                    continue
            elif kind == "arrive":
                after = (change(state, what[0], 1, 0), flying, reading, held, commits)
            elif kind == "expect":
                after = (change(state, what[0], 1, what[1]), flying, reading, held, commits)
            elif kind == "copy":
                slot, barrier, num_bytes, tag = what
                assert not any(slot in pair for pair in reading), f"{name} writes {slot}, which is being read"
                assert all(slot != other[0] for other in flying), f"{name} writes {slot} twice at once"
                kept = frozenset(each for each in held if each[0] != slot)
                after = (state, flying | {(slot, barrier, num_bytes, tag)}, reading, kept, commits)
            elif kind == "read":
                assert not any(other[0] in what for other in flying), f"{name} reads {what} before it is there"
                tags = tuple(tag for slot, tag in sorted(held) if slot in what)
                assert reads.setdefault((name, at[task]), tags) == tags and len(tags) == 2, f"{name} reads other data"
                after = (state, flying, reading | {(name, *what)}, held, commits)
            elif kind == "did read":
                after = (state, flying, reading - {(name, *what)}, held, commits)
            elif kind == "commit":
                after = (state, flying, reading, held, (*commits, (what[0], *((name, *pair) for pair in what[1:]))))
            following = tuple(each + (other == task) for other, each in enumerate(at))
            found.append((following, *after))
        for copy in flying:
            slot, barrier, num_bytes, tag = copy
            after = (flying - {copy}, reading, held | {(slot, tag)}, commits)
            found.append((at, change(state, barrier, 0, -num_bytes), *after))
        if commits:  # the tensor core works in order
            (barrier, *done), *later = commits
            found.append((at, change(state, barrier, 1, 0), flying, reading - set(done), held, tuple(later)))
        if not found:
            stuck = {name: traces[name][each:] for each, name in zip(at, names, strict=True)}
            stuck = {name: rest[0] for name, rest in stuck.items() if rest}
            assert not stuck, f"nothing can go on: {stuck}"
        for each in found:
            if each not in seen:
                seen.add(each)
                queue.append(each)
        assert len(seen) < limit, "too many states: a smaller case"
    return len(seen)
