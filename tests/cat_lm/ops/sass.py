"""Reads Hopper's machine code for what endangers asynchronous products, HGMMA.

A group of products begins with WARPGROUP.ARRIVE and is committed by the product marked gsb0;
WARPGROUP.DEPBAR.LE gsb0, N waits until N groups are left. Until then the sum and maybe the first
factor, in registers, belong to the matrix unit. Matrices in shared memory have descriptors in the
four uniform registers from gdesc[URn] on, the first two of which are of the first factor.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_PRODUCT = re.compile(
    r"(?P<sum>R\d+), (?:(?P<factor>R\d+)(?:\.\w+)?, )?gdesc\[UR(?P<descriptor>\d+)\]"
)
_PREDICATE = re.compile(r"!?U?P[T\d]")
_REGISTER = re.compile(r"(U?R)(\d+)(\.reuse)?")
# They write predicates alone.
_TESTS = ("ISETP", "FSETP", "DSETP", "HSETP2", "UISETP", "PLOP3", "UPLOP3", "R2P")


class Instruction(NamedTuple):
    """A line of the listing: `operands` as one text, `guard` a predicate or empty."""

    address: str
    guard: str
    name: str
    operands: str

    def __str__(self) -> str:
        return f"{self.address}: {self.name} {self.operands.strip()}"

    @property
    def is_product(self) -> bool:
        """Return True for an asynchronous product."""
        return self.name.startswith(("HGMMA", "QGMMA", "IGMMA", "BGMMA"))

    @property
    def commits(self) -> bool:
        """Return True for the last product of a group."""
        return self.is_product and "gsb0" in self.operands

    @property
    def left(self) -> int | None:
        """Return the number of groups that it lets go on; None if it waits for none."""
        if not self.name.startswith("WARPGROUP.DEPBAR"):
            return None
        return int(self.operands.split(",")[1], 16)

    @property
    def descriptors(self) -> set[str]:
        """Return the uniform registers that describe a product's matrices in shared memory."""
        parts = _PRODUCT.match(self.operands)
        first = int(parts["descriptor"])
        return registers("UR", first + 2, 2) if parts["factor"] else registers("UR", first, 4)

    @property
    def matrices(self) -> set[str]:
        """Return the registers of a product's sum and, where it has some, its first factor."""
        parts = _PRODUCT.match(self.operands)
        columns = int(re.search(r"\d+x(\d+)x\d+", self.name)[1])
        found = registers("R", int(parts["sum"][1:]), columns // 2)
        return found | (registers("R", int(parts["factor"][1:]), 4) if parts["factor"] else set())

    @property
    def written(self) -> set[str]:
        """Return the registers that it fills."""
        if self.name.startswith(_TESTS) or self.is_product:
            return set()
        for operand in self.operands.split(","):
            operand = operand.strip()
            if _PREDICATE.fullmatch(operand):
                continue
            found = _REGISTER.fullmatch(operand)
            return registers(found[1], int(found[2]), self._width) if found else set()
        return set()

    @property
    def _width(self) -> int:
        if self.name.startswith("LDSM"):
            return int(self.name[-1])
        if self.name.startswith("HMMA"):
            return 4 if ".F32" in self.name else 2
        if bits := re.search(r"\.(64|128)(?:\.|$)", self.name):
            return int(bits[1]) // 32
        is_wide = "WIDE" in self.name or self.name == "CS2R" or self.name.startswith("D")
        return 2 if is_wide else 1


def registers(kind: str, first: int, count: int) -> set[str]:
    """Name `count` registers from R or UR `first` on."""
    return {f"{kind}{first + i}" for i in range(count)}


class Group(NamedTuple):
    """Places of products that are committed together: of their ARRIVE, and their own."""

    first: int
    products: list[int]


class Code:
    """A kernel's instructions and where each may go on."""

    def __init__(self, text: str) -> None:
        found = (_LINE.search(line) for line in text.splitlines())
        self.instructions = [Instruction(*(p or "" for p in f.groups())) for f in found if f]
        places = {int(one.address, 16): i for i, one in enumerate(self.instructions)}
        self._next = [self._after(i, places) for i in range(len(self.instructions))]

    def _after(self, place: int, places: dict[int, int]) -> list[int]:
        instruction = self.instructions[place]
        jumps = instruction.name.startswith("BRA")
        targets = re.findall(r"\b0x[0-9a-f]+", instruction.operands) if jumps else []
        ends = instruction.name.startswith(("BRA", "EXIT", "RET")) and not instruction.guard
        after = [places[int(target, 16)] for target in targets] + ([] if ends else [place + 1])
        return [i for i in after if i < len(self.instructions)]

    def groups(self) -> list[Group]:
        """Find the groups of products, within which there is no branch."""
        found, group = [], Group(0, [])
        for place, instruction in enumerate(self.instructions):
            if instruction.name.startswith("WARPGROUP.ARRIVE"):
                group = Group(place, [])
            if not instruction.is_product:
                continue
            group.products.append(place)
            if instruction.commits:
                found.append(group)
                straight = all(self._next[i] == [i + 1] for i in range(group.first, place))
                assert straight, f"a branch among the products before {instruction}"
        return found

    def under_way(self, group: Group, start: int) -> set[int]:
        """Return the places after `start` at which the group may not have been waited for yet."""
        seen, ahead, last = set(), [(start + 1, 0)], group.products[-1]
        while ahead:
            place, later = ahead.pop()
            if (place, later) in seen or place >= len(self.instructions):
                continue
            instruction = self.instructions[place]
            if instruction.left is not None and place > last and later >= instruction.left:
                continue
            seen.add((place, later))
            later = min(8, later + (instruction.commits and place != last))
            ahead += [(after, later) for after in self._next[place]]
        return {place for place, _ in seen}

    def describes(self, start: int) -> bool:
        """Return True if a product reads a descriptor that is written at `start`."""
        (register,) = self.instructions[start].written
        seen, ahead = set(), list(self._next[start])
        while ahead:
            place = ahead.pop()
            if place in seen:
                continue
            seen.add(place)
            instruction = self.instructions[place]
            if instruction.is_product and register in instruction.descriptors:
                return True
            if register not in instruction.written:
                ahead += self._next[place]
        return False


def hazards(text: str) -> list[str]:
    """Describe what endangers products under way, in the order of the code.

    Restored descriptors: between the ARRIVE of a group and the wait for it, R2UR writes a uniform
    register that a product, of this group or a later one, then reads as a matrix descriptor. Other
    numbers that pass through such registers are none: UMOV and UIADD3 write there, too, right after
    a product was issued, in every kernel.

    Overwritten operands: between a product and the wait for it any other instruction writes a
    register of its sum or its first factor.
    """
    code = Code(text)
    found = {}
    for group in code.groups():
        for place in code.under_way(group, group.first):
            if code.instructions[place].name.startswith("R2UR") and code.describes(place):
                found[place] = f"restored descriptor: {code.instructions[place]}"
        for start in group.products:
            operands = code.instructions[start].matrices
            for place in code.under_way(group, start):
                if code.instructions[place].written & operands:
                    found[place] = f"overwritten operand: {code.instructions[place]}"
    return [found[place] for place in sorted(found)]
