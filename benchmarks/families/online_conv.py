"""An output of a long convolution that goes on.

The time of an output is a mean over the whole sequence, with batch size 1 and 256 features. The
contenders are ours in a `lax.scan`, ours step by step from Python, the whole convolution again for
each output, and a sum over all inputs for each output. The last two compute only some of the
outputs, because all of their outputs cost the same.
"""

import dataclasses
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.compare import Session, compare
from benchmarks.outcome import Check, Outcome
from benchmarks.problem import OURS, Call, Contenders, Problem
from jax_models.ops import empty_long_conv_state, long_conv, online_conv

PART = "an output"
MAX_GROWTH = 3
"""The largest allowed growth of our time per output, from 1,024 to 16,384 steps."""


@dataclasses.dataclass(frozen=True)
class OnlineConv(Problem):
    """A sequence and a filter of the same length."""

    length: int
    features: int
    parts = (PART,)
    rounds = 3

    @property
    def name(self) -> str:
        """The length of the sequence and the filter."""
        return f"L {self.length}"

    def arrays(self):
        """Inputs (length, 1, features), and a filter (features, length)."""
        rng = np.random.default_rng(0)
        inputs = rng.standard_normal((self.length, 1, self.features), np.float32)
        return {"v": inputs, "h": rng.standard_normal((self.features, self.length), np.float32)}

    def oracle(self):
        """Computes the outputs with an FFT, but only those that all contenders compute."""
        v, h = (x.astype(np.float64) for x in self.arrays().values())
        spectrum = np.fft.rfft(v[:, 0].T, 2 * self.length) * np.fft.rfft(h, 2 * self.length)
        y = np.fft.irfft(spectrum, 2 * self.length)[:, : self.num_compared]
        return {"y": y.T[:, None]}

    @property
    def num_compared(self) -> int:
        """Number of outputs that all contenders compute."""
        return min(self.length, 50_000 // self.length)

    def targets(self, part, platform):
        """The largest allowed ratios of our time to the peers'."""
        return {1024: {"FFT again": 0.1}, 4096: {"FFT again": 0.02, "direct sum": 0.4}}.get(
            self.length, {}
        )


def problems(quick: bool) -> list[OnlineConv]:
    """Lengths that grow by a factor of 4."""
    return [OnlineConv(n, 256) for n in ((1024,) if quick else (256, 1024, 4096, 16384))]


def _taps(h, length: int):
    return h[:, :length]


def _step(problem: OnlineConv, h, state, v):
    y, state = online_conv(v[..., None], state, taps=_taps, params=h, max_length=problem.length)
    return state, y[..., 0]


def _step_by_step(step: Callable, parameter, empty: Callable, v, count: int) -> Call:
    step = jax.jit(step, donate_argnums=1)
    inputs = list(v[:count])

    def run():
        ys, state = [], empty()
        for v_t in inputs:
            state, y = step(parameter, state, v_t)
            ys.append(jax.block_until_ready(y))
        return ys

    return Call(run, lambda: {"y": np.stack(run())}, parts=count)


contenders = Contenders()


@contenders.jax(OURS)
def ours(problem: OnlineConv) -> Call:
    """Our operator in a `lax.scan`."""
    v, h = map(jnp.asarray, problem.arrays().values())

    @jax.jit
    def scan(h, v):
        empty = empty_long_conv_state(1, problem.features, problem.length)
        return jax.lax.scan(partial(_step, problem, h), empty, v)[1]

    call = lambda: jax.block_until_ready(scan(h, v))  # noqa: E731
    return Call(
        call, lambda: {"y": np.asarray(call())[: problem.num_compared]}, parts=problem.length
    )


@contenders.jax(f"{OURS}, steps")
def ours_steps(problem: OnlineConv) -> Call:
    """Our operator, called from Python, which waits for each output."""
    v, h = map(jnp.asarray, problem.arrays().values())
    empty = partial(empty_long_conv_state, 1, problem.features, problem.length)
    step = _step_by_step(partial(_step, problem), h, empty, v, problem.length)
    return step._replace(result=lambda: {"y": np.stack(step.call())[: problem.num_compared]})


@contenders.jax("FFT again")
def whole_convolution(problem: OnlineConv) -> Call:
    """The whole convolution for each output."""
    v, h = map(jnp.asarray, problem.arrays().values())
    row = jnp.moveaxis(v, 0, 2)
    whole = jax.jit(long_conv)

    def call():
        ys = [jax.block_until_ready(whole(row, h)) for _ in range(problem.num_compared)]
        return ys[-1]

    result = lambda: {"y": np.moveaxis(np.asarray(call()), 2, 0)[: problem.num_compared]}  # noqa: E731
    return Call(call, result, parts=problem.num_compared)


@contenders.jax("direct sum")
def direct(problem: OnlineConv) -> Call:
    """A sum over all inputs for each output."""
    v, h = map(jnp.asarray, problem.arrays().values())
    length = problem.length
    h_reversed = jnp.pad(h[:, ::-1].T, ((0, length), (0, 0)))

    def step(h_reversed, state, v):
        position, past = state
        past = jax.lax.dynamic_update_slice_in_dim(past, v, position, axis=0)
        weights = jax.lax.dynamic_slice_in_dim(h_reversed, length - 1 - position, length)
        return (position + 1, past), jnp.sum(past * weights, axis=0, keepdims=True)

    empty = lambda: (jnp.int32(0), jnp.zeros((length, problem.features)))  # noqa: E731
    return _step_by_step(step, h_reversed, empty, v, problem.num_compared)


def measure(session: Session) -> Outcome:
    """Measures all contenders, and checks how our time grows with the length."""
    chosen = problems(session.quick)
    outcome = compare(session, __name__, contenders, chosen)
    if not session.quick:
        short, long = (outcome.row(f"L {n}", PART).ms for n in (1024, 16384))
        what = "L 16384 / L 1024"
        outcome.checks.append(Check("growth", PART, what, long / short, MAX_GROWTH))
    return outcome
