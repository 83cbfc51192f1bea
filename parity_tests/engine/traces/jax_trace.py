"""Run a JAX side, and record each call of its modules."""

from collections.abc import Callable, Sequence

from parity_tests.engine.candidates.evaluator import Evaluator
from parity_tests.engine.candidates.jax_side import JaxSide
from parity_tests.engine.problem import Problem
from parity_tests.engine.results import Results
from parity_tests.engine.traces.frameworks import recording
from parity_tests.engine.traces.trace import Trace


def trace_jax(
    problem: Problem,
    dtype: str,
    oracle: Results,
    cast_to: Sequence[str] = (),
    *,
    rounding: str | None = None,
    noise: int = 0,
    evaluator: Callable[..., Evaluator] = Evaluator,
) -> Trace:
    """The calls of a JAX side. The arguments are those of `JaxSide` and of `JaxSide.run`."""
    trace = Trace()
    whole = trace.begin("", "run")
    with recording(trace, problem) as side, trace.running(whole):
        results = JaxSide(side, rounding=rounding, evaluator=evaluator).run(
            side, dtype, oracle, cast_to, noise=noise
        )
    return trace.finish(problem, results)
