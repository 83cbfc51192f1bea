"""What a compiled program's text says."""

import re
from collections import Counter

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)


def collectives(hlo: str) -> Counter[str]:
    """How many of each the program has, a loop's once."""
    return Counter(re.findall(rf"[ )]({'|'.join(COLLECTIVES)})(?:-start)?\(", hlo))


def entry(hlo: str) -> str:
    """The part outside loops, branches and calls."""
    found = re.search(r"^ENTRY .*?^}", hlo, flags=re.DOTALL | re.MULTILINE)
    if found is None:
        raise ValueError("hlo: expected an ENTRY computation, got none")
    return found[0]


def precisions(hlo: str) -> Counter[str]:
    """How many products (dot, convolution) there are of each `operand_precision`."""
    products = re.findall(r"[ )](?:dot|convolution)\(.*", hlo)
    found = (re.search(r"operand_precision=\{([\w,]+)\}", product) for product in products)
    return Counter(_both(match[1]) if match else "default" for match in found)


def _both(operands: str) -> str:
    """`highest` for `highest,highest`."""
    return "/".join(dict.fromkeys(operands.split(",")))


def memory_needed(message: str) -> tuple[float, float] | None:
    """GiB that the program needs and that a chip has, where the compiler's error says so."""
    found = re.search(r"\(([\d.]+)([KMGT])\) exceeds available HBM \(([\d.]+)([KMGT])\)", message)
    if found is None:
        return None
    gib = {"K": 2.0**-20, "M": 2.0**-10, "G": 1.0, "T": 2.0**10}
    return float(found[1]) * gib[found[2]], float(found[3]) * gib[found[4]]
