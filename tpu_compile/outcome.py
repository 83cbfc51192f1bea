"""Compiles a program, and checks what the compiler made of it."""

import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from tpu_compile.hlo import (
    collectives,
    entry,
    exchanges,
    memory_needed,
    precisions,
)
from tpu_compile.programs import Program

PRECISION = "highest"
"""The precision of matrix products, the same as in the parity tests."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The figures of a compiled program for one chip, and its faults."""

    program: Program
    faults: tuple[str, ...]
    seconds: float | None = None
    """The time to compile."""
    code_bytes: int | None = None
    """The size of the instructions."""
    peak_bytes: int | None = None
    """The peak of the chip's memory use, including the arguments."""
    flops: float | None = None
    """The number of operations; those of a loop count once."""
    collectives: Mapping[str, int] = dataclasses.field(default_factory=dict)
    collective_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The size of the results of all collectives, by kind."""
    largest_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The size of the results of the largest collective, by kind."""
    precisions: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The number of products, by precision."""

    def to_dict(self) -> dict[str, Any]:
        """The outcome for JSON."""
        program = self.program
        of_program = {"name": program.name, "part": program.part, "topology": program.topology}
        own = {name: value for name, value in vars(self).items() if name != "program"}
        return of_program | {
            name: dict(value) if isinstance(value, Mapping) else value
            for name, value in own.items()
        }


def compile_program(program: Program) -> Outcome:
    """Lowers and compiles a program. An error becomes a fault of the outcome."""
    try:
        with jax.default_matmul_precision(None if program.exchange_faults else PRECISION):
            lowered = program.lower()
        start = time.perf_counter()
        compiled: Any = lowered.compile()
    except Exception as error:  # must not stop the other programs
        return Outcome(program, (one_line_reason(error),))
    seconds = time.perf_counter() - start
    # Compare the collectives with those that the program should need.
    hlo, memory = compiled.as_text(), compiled.memory_analysis()
    found = exchanges(hlo)
    nbytes: dict[str, list[int]] = {}
    for each in found:
        nbytes.setdefault(each.kind, []).append(each.nbytes)
    if program.exchange_faults:
        faults = [*program.exchange_faults(found)]
    else:
        faults = [*hlo_faults(hlo, program.collectives)]
        if not all(s.is_fully_replicated for s in jax.tree.leaves(compiled.output_shardings)):
            faults.append("expected the results whole on every chip, some are divided")
    return Outcome(
        program,
        tuple(faults),
        seconds,
        memory.generated_code_size_in_bytes,
        memory.peak_memory_in_bytes,
        compiled.cost_analysis().get("flops"),
        {kind: len(sizes) for kind, sizes in nbytes.items()},
        {kind: sum(sizes) for kind, sizes in nbytes.items()},
        {kind: max(sizes) for kind, sizes in nbytes.items()},
        precisions(hlo),
    )


def hlo_faults(hlo: str, expected: Mapping[str, int]) -> Iterator[str]:
    """The differences between a compiled program and its expected collectives and precision."""
    found, outside = collectives(hlo), collectives(entry(hlo))
    if found != expected:
        yield f"expected {counts_as_text(expected)}, got {counts_as_text(found)}"
    if repeated := found - outside:
        yield f"{counts_as_text(repeated)} in a loop or a branch"
    of_precision = precisions(hlo)
    total = of_precision.total()
    if coarser := total - of_precision["highest"]:
        found_precisions = counts_as_text(of_precision)
        yield f"{coarser} of {total} products are coarser than float32: {found_precisions}"


def one_line_reason(error: Exception) -> str:
    """An error in one line, with both sizes in GiB if the program does not fit the chip."""
    if memory := memory_needed(str(error)):
        needed, available = memory
        return f"too large for a chip: needs {needed:.2f} GiB of {available:.2f} GiB"
    first, *_ = str(error).strip().splitlines() or [""]
    return f"does not compile: {type(error).__name__}: {first}"


def counts_as_text(number: Mapping[str, int]) -> str:
    """Numbers as text: `all-reduce 1, all-to-all 2`."""
    return ", ".join(f"{name} {n}" for name, n in number.items()) or "none"
