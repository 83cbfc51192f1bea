"""Reads collectives, precisions and memory sizes from the text of a compiled program (HLO)."""

import math
import re
from collections import Counter
from typing import NamedTuple

import numpy as np

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


class Array(NamedTuple):
    """The dtype and the shape of a program's array on one chip."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size of the array in bytes."""
        bits = re.search(r"\d+", self.dtype)
        return math.prod(self.shape) * (int(bits[0]) // 8 if bits else 1)


class Collective(NamedTuple):
    """An exchange between chips. In a loop, it is a single one, however often it runs."""

    kind: str
    results: tuple[Array, ...]
    """The results on one chip; for a reduce-scatter in a fusion, the array before the scatter."""
    groups: tuple[tuple[int, ...], ...]
    """The groups of chips that exchange with each other. Empty: all chips do."""

    @property
    def nbytes(self) -> int:
        """The size of the results in bytes."""
        return sum(array.nbytes for array in self.results)


def exchanges(hlo: str) -> list[Collective]:
    """The collectives of a program. One in a loop is listed once.

    The TPU compiler divides an asynchronous collective among several fusions with the same
    `chain_id`, and it fuses an all-reduce with the scatter that follows it.
    """
    found, chains, computation = [], set(), ""
    for line in hlo.splitlines():
        if start := re.match(r"(?:ENTRY )?%([\w.-]+) \(", line):
            computation = start[1]
        instruction = re.search(rf" = (.*?) ({'|'.join(COLLECTIVES)})(-start)?\(([^)]*)\)", line)
        if not instruction:
            continue
        if chain := re.search(r'chain_id="\d+"', line):
            if chain[0] in chains:
                continue
            chains.add(chain[0])
        of_type, kind, starts, operands = instruction.groups()
        results = _arrays(of_type)
        if starts and kind != "all-reduce":  # their type lists the operands first
            count = operands.count("%")
            results = results[count : 2 * count]
        if computation.startswith("all-reduce-scatter"):
            kind = "reduce-scatter"
        found.append(Collective(kind, tuple(results), _groups(line)))
    return found


def collectives(hlo: str) -> Counter[str]:
    """The number of collectives of each kind. One in a loop counts once."""
    return Counter(each.kind for each in exchanges(hlo))


def _arrays(of_type: str) -> list[Array]:
    """The arrays of a type such as `(f32[8,4]{1,0}, s32[])`."""
    found = re.findall(r"(\w+)\[([\d,]*)\]", of_type)
    return [Array(dtype, _integers(shape)) for dtype, shape in found]


def _groups(line: str) -> tuple[tuple[int, ...], ...]:
    """The chips of each group of a collective.

    HLO has three notations for groups: a list of them, `{{0,1},{2,3}}`; the shape of an array of
    groups, `[2,2]<=[4]`, whose rows are the groups; and axes of a mesh, `mesh['a'=2,'b'=2] {'b'}`.
    """
    named = re.search(r"(?:replica_groups|source_target_pairs)=(.*)", line)
    if not named:
        return ()
    if listed := re.match(r"\{(.*?)\}(?!,\{)", named[1]):
        return tuple(map(_integers, re.findall(r"[\d,]*\d", listed[1])))
    if counted := re.match(rf"\[([\d,]+)\]<={CHIP_ORDER}", named[1]):
        chips = _chip_order(counted[2], counted[3]).reshape(_integers(counted[1]))
        return tuple(map(tuple, chips.tolist()))
    mesh = re.match(rf"mesh\[([^]]*)\](?:, device_ids=\({CHIP_ORDER}\))? {{(['\w,]+)}}", named[1])
    if not mesh:
        raise ValueError(f"hlo: expected the groups of a collective, got {named[1][:100]}")
    sizes = {name: int(size) for name, size in re.findall(r"('\w+')=(\d+)", mesh[1])}
    box = [*sizes.values()]
    along = [i for i, name in enumerate(sizes) if name in mesh[4].split(",")]
    others = [i for i in range(len(box)) if i not in along]
    chips = _chip_order(mesh[2] or str(math.prod(box)), mesh[3]).reshape(box)
    chips = chips.transpose(*others, *along).reshape(-1, math.prod(box[i] for i in along))
    return tuple(map(tuple, chips.tolist()))


CHIP_ORDER = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
"""Matches `[4,2]T(1,0)`: the chips, counted in a (4, 2) array that is then transposed."""


def _chip_order(box: str, order: str | None) -> np.ndarray:
    shape = _integers(box)
    chips = np.arange(math.prod(shape)).reshape(shape)
    return chips.transpose(_integers(order)) if order else chips


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def entry(hlo: str) -> str:
    """The entry computation: the part of a program outside loops, branches and calls."""
    found = re.search(r"^ENTRY .*?^}", hlo, flags=re.DOTALL | re.MULTILINE)
    if found is None:
        raise ValueError("hlo: expected an ENTRY computation, got none")
    return found[0]


def precisions(hlo: str) -> Counter[str]:
    """The number of products (dot, convolution) with each `operand_precision`."""
    products = re.findall(r"[ )](?:dot|convolution)\(.*", hlo)
    found = (re.search(r"operand_precision=\{([\w,]+)\}", product) for product in products)
    return Counter(_joined_precision(match[1]) if match else "default" for match in found)


def _joined_precision(operands: str) -> str:
    """Joins the precisions of both operands; `highest,highest` becomes `highest`."""
    return "/".join(dict.fromkeys(operands.split(",")))


def memory_needed(message: str) -> tuple[float, float] | None:
    """The GiB that a program needs and that a chip has; None if the error is not about memory."""
    found = re.search(r"\(([\d.]+)([KMGT])\) exceeds available HBM \(([\d.]+)([KMGT])\)", message)
    if found is None:
        return None
    gib = {"K": 2.0**-20, "M": 2.0**-10, "G": 1.0, "T": 2.0**10}
    return float(found[1]) * gib[found[2]], float(found[3]) * gib[found[4]]
