"""An analysis of a kernel's assembly: loops, waits for the tensor cores, and the length of its epilogue.

Read from the text of `cuobjdump -sass`, where every instruction has its address and every branch names one.  Loops are
natural loops: the blocks from which the end of a back edge is reached without leaving what its head dominates.  The
main loop is the innermost one with the most products: instructions of the tensor cores where the kernel has any, else
fp32 multiply-adds, of which epilogues have many, too.  In a flattened kernel it is also the loop over tiles; then the
epilogue is what an iteration may skip.  Where warps have roles of their own the main loop is that of those
which issue products, and so is the epilogue; what the others do beside is not counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([^;]+);", re.MULTILINE)
BRANCH = re.compile(r"^(?:BRA|JMP)\b[\w.]* (?P<condition>.*?)(?P<target>0x[0-9a-f]+)$")
CALL = re.compile(r"^CALL\b.*\b(0x[0-9a-f]+)$")
TENSOR_CORE = re.compile(r"^(?:U?[HIQO]GMMA|UTC[HIQO]\w*MMA|[HIQD]MMA)\b")  # of halves, integers, e4m3, doubles
MULTIPLY_ADD = re.compile(r"^FFMA2?\b")
WAIT_FOR_ALL = re.compile(r"^WARPGROUP\.DEPBAR\.LE gsb\d, 0x0\b")


class Instruction(NamedTuple):
    address: int
    predicate: str | None
    text: str

    @property
    def operation(self) -> str:
        return self.text.split(".")[0].split()[0]

    @property
    def targets(self) -> tuple[int, ...]:
        found = BRANCH.match(self.text)
        return (int(found["target"], 16),) if found else ()

    @property
    def called(self) -> int | None:
        """Return the address that the instruction calls."""
        found = CALL.match(self.text)
        return int(found[1], 16) if found else None

    @property
    def is_indirect(self) -> bool:
        """Return whether the instruction branches to an address in a register."""
        return self.operation in ("BRX", "JMX")

    @property
    def ends(self) -> bool:
        """Return whether the instruction never continues with the next one in memory."""
        branch = BRANCH.match(self.text)
        if self.predicate is not None or (branch and branch["condition"]):  # "@P0 BRA 0x60", "BRA.U !UP0, 0x60"
            return False
        return branch is not None or self.is_indirect or self.operation in ("EXIT", "RET")


@dataclass(frozen=True)
class Loop:
    """A natural loop; blocks are named by the address of their first instruction."""

    head: int
    ends: frozenset[int]  # where the branches back come from
    blocks: frozenset[int]


class Code:
    """The control flow of one kernel."""

    def __init__(self, listing: str) -> None:
        self.instructions = [
            Instruction(int(address, 16), predicate or None, text.strip())
            for address, predicate, text in INSTRUCTION.findall(listing)
        ]
        if not self.instructions:
            raise ValueError("no instruction was found in the listing\n  fix: the output of cuobjdump -sass")

    @cached_property
    def blocks(self) -> dict[int, list[Instruction]]:
        starts = {self.instructions[0].address}
        for instruction, following in zip(self.instructions, self.instructions[1:], strict=False):
            called = () if instruction.called is None else (instruction.called,)
            if instruction.targets or instruction.ends or called:
                starts.update((*instruction.targets, *called, following.address))
        blocks: dict[int, list[Instruction]] = {}
        for instruction in self.instructions:
            if instruction.address in starts:
                block = blocks.setdefault(instruction.address, [])
            block.append(instruction)
        return blocks

    @cached_property
    def following(self) -> dict[int, tuple[int, ...]]:
        names = list(self.blocks)
        after = dict(zip(names, [*names[1:], None], strict=True))
        found = {}
        for name, block in self.blocks.items():
            last, then = block[-1], after[name]
            found[name] = (*last.targets, *(() if last.ends or then is None else (then,)))
        # A call of what never returns is a jump: ptxas leaves loops so.
        calls = {name: block[-1].called for name, block in self.blocks.items()}
        called = {target for target in calls.values() if target is not None}
        returning = {name for name, block in self.blocks.items() if block[-1].operation == "RET"}
        subroutines = {each for each in called if returning & reached([each], found)}
        for name, target in calls.items():
            if target is not None and target not in subroutines:
                found[name] = (target, *(found[name] if self.blocks[name][-1].predicate else ()))
        # A table says where an indirect branch leads, and is not listed: to what is not reached in any other way.
        known, table = reached([names[0], *subroutines], found), []
        for name in names:
            if name not in known:
                table.append(name)
                known |= reached([name], found)
        for name, block in self.blocks.items():
            if block[-1].is_indirect:
                found[name] += tuple(table)
        return found

    @cached_property
    def leading(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {name: [] for name in self.blocks}
        for name, targets in self.following.items():
            for target in targets:
                found[target].append(name)
        return found

    @cached_property
    def dominators(self) -> dict[int, frozenset[int]]:
        """Return, for each block, the blocks that every path from the entry passes; unreachable blocks are left out."""
        entry = next(iter(self.blocks))
        order = [name for name in self.blocks if name in reached([entry], self.following)]
        found = dict.fromkeys(order, frozenset(order)) | {entry: frozenset((entry,))}
        changed = True
        while changed:
            changed = False
            for name in order[1:]:
                before = [found[block] for block in self.leading[name] if block in found]
                now = frozenset.intersection(*before) | {name}
                if now != found[name]:
                    found[name], changed = now, True
        return found

    @cached_property
    def loops(self) -> list[Loop]:
        ends: dict[int, list[int]] = {}
        for name, dominators in self.dominators.items():
            for target in self.following[name]:
                if target in dominators:
                    ends.setdefault(target, []).append(name)
        return [
            Loop(head, frozenset(found), frozenset({head, *reached(found, self.leading, closed={head})}))
            for head, found in ends.items()
        ]

    @cached_property
    def _product(self) -> re.Pattern[str]:
        """Return the pattern of the instructions that multiply matrices in this kernel."""
        return TENSOR_CORE if any(TENSOR_CORE.match(each.text) for each in self.instructions) else MULTIPLY_ADD

    def products(self, blocks: Iterable[int]) -> int:
        return sum(bool(self._product.match(each.text)) for block in blocks for each in self.blocks[block])

    def length(self, blocks: Iterable[int]) -> int:
        return sum(len(self.blocks[block]) for block in blocks)

    @cached_property
    def main_loop(self) -> Loop | None:
        innermost = [loop for loop in self.loops if not any(other.blocks < loop.blocks for other in self._multiplying)]
        counted = [(self.products(loop.blocks), loop) for loop in innermost]
        return max((pair for pair in counted if pair[0]), key=lambda pair: pair[0], default=(0, None))[1]

    @cached_property
    def _multiplying(self) -> list[Loop]:
        return [loop for loop in self.loops if self.products(loop.blocks)]

    @cached_property
    def every_iteration(self) -> frozenset[int]:
        """Blocks of the main loop that no iteration can avoid."""
        loop = self.main_loop
        if loop is None:
            return frozenset()
        inside = {name: tuple(t for t in self.following[name] if t in loop.blocks) for name in loop.blocks}
        return frozenset(
            block
            for block in loop.blocks
            if block == loop.head or not loop.ends & (reached([loop.head], inside, closed={block}) - {block})
        )

    @property
    def waits_in_main_loop(self) -> int:
        """Times that an iteration over K waits until all wgmma are done: the tensor cores then stand still."""
        return sum(bool(WAIT_FOR_ALL.match(each.text)) for block in self.every_iteration for each in self.blocks[block])

    @property
    def plain_loads_in_main_loop(self) -> int:
        """Loads from memory to registers in each iteration over K: their latency is not hidden behind products."""
        return sum(each.text.startswith("LDG.") for block in self.every_iteration for each in self.blocks[block])

    def faults(self) -> list[str]:
        """Return the faults that a kernel of products has."""
        found = []
        if self.waits_in_main_loop:
            found.append(f"waits for all wgmma {self.waits_in_main_loop} times in a step of K")
        if self.plain_loads_in_main_loop:
            found.append(f"{self.plain_loads_in_main_loop} loads in a step of K are not pipelined")
        if not self.epilogue:
            found.append("its loop over K, or the epilogue behind it, was not found")
        return found

    @property
    def epilogue(self) -> int:
        """Instructions between a tile's last product and the next tile's first; of a single tile, to the end."""
        loop = self.main_loop
        if loop is None:
            return 0
        around = [other for other in self._multiplying if other.blocks > loop.blocks]
        if around:
            return self.length(min(around, key=lambda other: len(other.blocks)).blocks - loop.blocks)
        optional = loop.blocks - self.every_iteration
        after = {block for name in loop.blocks for block in self.following[name]} - loop.blocks
        behind = reached(after, self.following, closed=loop.blocks) - loop.blocks
        # A flattened loop holds the epilogue; what an ordinary one skips are its last loads.
        return max(self.length(optional), self.length(behind))


def reached(starts: Iterable[int], following: Mapping[int, Iterable[int]], closed: Iterable[int] = ()) -> set[int]:
    """Blocks that lead on from `starts`, those included; ways end at the closed ones."""
    closed, found, queue = set(closed), set(starts), list(starts)
    while queue:
        block = queue.pop()
        if block not in closed:
            queue += [after for after in following[block] if after not in found]
            found.update(following[block])
    return found
