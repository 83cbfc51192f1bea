"""Measures the contenders of a family, problem by problem."""

import dataclasses
from collections.abc import Callable, Iterable
from functools import cached_property, partial

from rich.console import Console

from benchmarks.outcome import Outcome, Row, check_targets
from benchmarks.problem import (
    NATIVE,
    OURS,
    Arrays,
    CannotSolve,
    Contenders,
    Limits,
    Problem,
    relative_error,
)
from benchmarks.resume import ResumableRun
from benchmarks.workers import Workers


@dataclasses.dataclass
class Session:
    """The workers, the console and the options of a run of the benchmarks."""

    workers: Workers
    console: Console
    quick: bool = False
    measure_limits: Callable[["Session"], Limits] | None = None
    resumable: ResumableRun | None = None

    @cached_property
    def limits(self) -> Limits | None:
        """The limits of the machine, measured on first use."""
        return self.measure_limits and self.measure_limits(self)

    @cached_property
    def platform(self) -> str:
        """The platform of JAX: cpu, gpu or tpu."""
        return self.workers.device("jax").split(":")[0]

    def measure_once(self, name: str, measure: Callable[[], Outcome]) -> Outcome:
        """Measures a piece of a family, unless an earlier call of the same run has measured it."""
        if self.resumable is None:
            return measure()
        return self.resumable.measure_once(f"{self.workers.allocator}: {name}", measure)

    @property
    def rounds(self) -> int:
        """The number of bursts of each contender."""
        return 2 if self.quick else 4


def compare(
    session: Session,
    module: str,
    contenders: Contenders,
    problems: Iterable[Problem],
    *,
    shown: bool = True,
) -> Outcome:
    """Measures all contenders of a module on all problems.

    Prints the results of each problem, or only its name if `shown` is false.
    """
    from benchmarks.report.table import show

    outcome = Outcome()
    for problem in problems:
        found = session.measure_once(
            f"{module}: {problem.name}",
            partial(compare_problem, session, module, contenders, problem),
        )
        if shown:
            show(session.console, found)
        else:
            session.console.print(problem.name, style="dim")
        outcome += found
    return outcome


def compare_problem(
    session: Session, module: str, contenders: Contenders, problem: Problem
) -> Outcome:
    """Measures all contenders on all parts of a problem."""
    outcome = Outcome()
    oracle = _oracle(problem, outcome)
    for part in problem.parts:
        outcome += compare_part(session, module, contenders, problem, part, oracle)
    return outcome


def _oracle(problem: Problem, outcome: Outcome) -> Arrays:
    try:
        return problem.oracle()
    except ImportError as error:
        outcome.left_out["the errors"] = str(error)
        return {}


def compare_part(
    session: Session,
    module: str,
    contenders: Contenders,
    problem: Problem,
    part: str,
    oracle: Arrays,
) -> Outcome:
    """Measures all contenders on one part of a problem."""
    # Only a failure of our own contender ends the run; peers that fail are left out.
    outcome, prepared = Outcome(), {}
    for name, contender in contenders.items():
        framework = contender.framework
        if problem.solved_by is not None and name not in problem.solved_by:
            continue
        try:
            session.workers.device(framework)
            prepared[framework, name] = session.workers.prepare(
                framework, module, name, problem, part
            )
        except (ImportError, CannotSolve) as error:
            outcome.left_out[f"{name} ({problem.name})"] = str(error)
        except RuntimeError as error:
            if name == OURS:
                raise
            outcome.left_out[f"{name} ({problem.name})"] = f"failed: {str(error).splitlines()[0]}"
    # Disturbed bursts are repeated, but at most once on average.
    rounds = min(session.rounds, problem.rounds)
    max_rounds = rounds if session.quick else 2 * rounds
    timings = session.workers.time(
        list(prepared), rounds=rounds, max_rounds=max_rounds, num_busy=problem.num_busy
    )
    # Compare the times with the limits of the machine, and the results with the oracle.
    work = problem.work(part)
    for (framework, name), (compile_s, memory, result) in prepared.items():
        timing = timings[framework, name]
        errors = {key: relative_error(x, oracle[key]) for key, x in result.items() if key in oracle}
        outcome.rows.append(
            Row(
                problem=problem.name,
                part=part,
                name=name,
                framework=framework,
                ms=1e3 * timing.seconds,
                limit_ms=session.limits.ms(work) if work and session.limits else None,
                compile_s=compile_s,
                memory=memory,
                error=errors.pop("y", None),
                gradient_error=max(errors.values(), default=None),
                calls=timing.calls,
                disturbed=timing.disturbed,
            )
        )
    platform = session.platform
    targets = {
        OURS: problem.targets(part, platform),
        NATIVE: problem.targets_with_kernels(part, platform),
    }
    outcome.checks = check_targets(outcome.rows, targets)
    return outcome
