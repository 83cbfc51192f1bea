"""The long convolution, `y_t = Σ_s h_{t−s} v_s`, of a whole sequence and step by step.

The time of a step is a mean over the whole sequence, with batch size 1 and 256 features. The
contenders for a step are ours in a `lax.scan`, ours called from Python, the whole convolution again
for each output, and a sum over all inputs for each output. The last two compute only some of the
outputs, because all of their outputs cost the same.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.problem import FORWARD, OURS, Call, Contenders, Function, Problem, Work, operator
from jax_models.ops import empty_long_conv_state, long_conv, online_conv

PLAIN, TORCH = "plain jnp.fft", "torch.fft"
STEPS, AGAIN, DIRECT = f"{OURS}, steps", "FFT again", "direct sum"


@dataclasses.dataclass(frozen=True)
class LongConv(Problem):
    """A long convolution at some sizes."""

    batch: int
    features: int
    time: int
    solved_by = (OURS, PLAIN, TORCH)

    @property
    def name(self) -> str:
        """The sizes, in a few words."""
        return f"{self.batch} × {self.features}, L {self.time}"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of v and y."""
        return self.batch, self.features, self.time

    def arrays(self):
        """Inputs, and a decaying filter for each feature."""
        rng = np.random.default_rng(0)
        h = rng.standard_normal(self.shape[1:]) * np.exp(-4 * np.arange(self.time) / self.time)
        return {"v": rng.standard_normal(self.shape, np.float32), "h": h.astype(np.float32)}

    def cotangent(self):
        """A random gradient of y."""
        return np.random.default_rng(1).standard_normal(self.shape, np.float32)

    def oracle(self):
        """Computes the convolution with NumPy's FFT, in float64."""
        arrays = (*self.arrays().values(), self.cotangent())
        v_f, h_f, g_f = (np.fft.rfft(x.astype(np.float64), 2 * self.time) for x in arrays)
        products = {"y": v_f * h_f, "v": g_f * h_f.conj(), "h": (g_f * v_f.conj()).sum(axis=0)}
        return {
            name: np.fft.irfft(x, 2 * self.time)[..., : self.time] for name, x in products.items()
        }

    def work(self, part) -> Work | None:
        """Reads v and h, writes y. A real FFT of n = 2 L numbers takes 5/2 n log₂ n operations."""
        rows, length = self.batch * self.features, 2 * self.time
        transforms, arrays, filters = (2, 2, 1) if part == FORWARD else (4, 4, 2)
        return Work(
            flops=2.5 * length * math.log2(length) * (transforms * rows + filters * self.features),
            num_bytes=4 * self.time * (arrays * rows + filters * self.features),
        )

    def targets(self, part, platform):
        """The largest allowed ratios of our time to the peers'."""
        if platform != "cpu":
            return {"torch": 1.0}
        return {"torch": 1.35, PLAIN: 0.8} if part == FORWARD else {"torch": 1.0}


class Online(LongConv):
    """The same convolution, whose inputs arrive step by step."""

    parts = ("an output",)
    rounds = 3
    solved_by = (OURS, STEPS, AGAIN, DIRECT)

    @property
    def name(self) -> str:
        """The length of the sequence and the filter."""
        return f"L {self.time}"

    @property
    def num_compared(self) -> int:
        """Number of outputs that all contenders compute."""
        return min(self.time, 50_000 // self.time)

    def oracle(self):
        """The outputs that all contenders compute."""
        return {"y": super().oracle()["y"][..., : self.num_compared]}

    def work(self, part):
        """None: the least work of a step has no useful bound."""

    def targets(self, part, platform):
        """The largest allowed ratios of our time to the peers'."""
        return {1024: {AGAIN: 0.1}, 4096: {AGAIN: 0.02, DIRECT: 0.4}}.get(self.time, {})


def problems(quick: bool) -> list[LongConv]:
    """Whole sequences with filters of the same length, and single rows step by step."""
    sizes = [(4, 256, 1024), (4, 256, 4096), (4, 256, 16384), (64, 386, 128)]
    lengths = (1024,) if quick else (256, 1024, 4096, 16384)
    whole = [LongConv(*size) for size in (sizes[:1] if quick else sizes)]
    return [*whole, *(Online(1, 256, length) for length in lengths)]


contenders = Contenders()


@contenders.jax(OURS)
def ours(problem: LongConv) -> Function | Call:
    """Our operators with their default options: `long_conv`, or `online_conv` in a `lax.scan`."""
    if not isinstance(problem, Online):
        return operator(problem, long_conv)
    v, h = map(jnp.asarray, problem.arrays().values())

    @jax.jit
    def scan(v, h):
        step = partial(_our_step, problem, h)
        return jax.lax.scan(step, _empty(problem), jnp.moveaxis(v, 2, 0))[1]

    call = lambda: jax.block_until_ready(scan(v, h))  # noqa: E731
    return Call(call, lambda: _compared(problem, call()), parts=problem.time)


@contenders.jax(PLAIN)
def plain(problem: LongConv) -> Function:
    """The straightforward version in JAX."""

    def conv(v, h):
        n = 2 * v.shape[-1]
        return jnp.fft.irfft(jnp.fft.rfft(v, n) * jnp.fft.rfft(h, n)[None], n)[..., : n // 2]

    return operator(problem, conv)


@contenders.torch(TORCH)
def torch_fft(problem: LongConv) -> Function:
    """The Annotated Hyena's convolution."""
    import torch

    def conv(v, h):
        n = 2 * v.shape[-1]
        product = torch.fft.rfft(v, n) * torch.fft.rfft(h, n)
        return torch.fft.irfft(product, n)[..., : n // 2]

    return operator(problem, conv)


@contenders.jax(STEPS)
def ours_steps(problem: Online) -> Call:
    """Our operator, called from Python, which waits for each output."""
    h = jnp.asarray(problem.arrays()["h"])
    return _from_python(
        problem, partial(_our_step, problem), h, partial(_empty, problem), problem.time
    )


@contenders.jax(AGAIN)
def whole_convolution(problem: Online) -> Call:
    """The whole convolution for each output."""
    v, h = map(jnp.asarray, problem.arrays().values())
    whole = jax.jit(long_conv)

    def call():
        y = v
        for _ in range(problem.num_compared):
            y = jax.block_until_ready(whole(v, h))
        return jnp.moveaxis(y, 2, 0)

    return Call(call, lambda: _compared(problem, call()), parts=problem.num_compared)


@contenders.jax(DIRECT)
def direct(problem: Online) -> Call:
    """A sum over all inputs for each output."""
    length = problem.time
    h_reversed = jnp.pad(problem.arrays()["h"][:, ::-1].T, ((0, length), (0, 0)))

    def step(h_reversed, state, v):
        position, past = state
        past = jax.lax.dynamic_update_slice_in_dim(past, v, position, axis=0)
        weights = jax.lax.dynamic_slice_in_dim(h_reversed, length - 1 - position, length)
        return (position + 1, past), jnp.sum(past * weights, axis=0, keepdims=True)

    empty = lambda: (jnp.int32(0), jnp.zeros((length, problem.features)))  # noqa: E731
    return _from_python(problem, step, h_reversed, empty, problem.num_compared)


def _our_step(problem: Online, h, state, v):
    taps = lambda h, count: h[:, :count]  # noqa: E731
    y, state = online_conv(v[..., None], state, taps=taps, params=h, max_length=problem.time)
    return state, y[..., 0]


def _empty(problem: Online):
    return empty_long_conv_state(1, problem.features, problem.time)


def _from_python(problem: Online, step: Callable, h, empty: Callable, count: int) -> Call:
    """Calls a step for the first `count` inputs, one by one."""
    step = jax.jit(step, donate_argnums=1)
    inputs = list(jnp.moveaxis(jnp.asarray(problem.arrays()["v"]), 2, 0)[:count])

    def call():
        ys, state = [], empty()
        for v_t in inputs:
            state, y = step(h, state, v_t)
            ys.append(jax.block_until_ready(y))
        return ys

    return Call(call, lambda: _compared(problem, call()), parts=count)


def _compared(problem: Online, ys) -> dict[str, np.ndarray]:
    """The outputs that all contenders compute. Those of a step are (1, features)."""
    return {"y": np.stack(ys[: problem.num_compared], axis=-1)}
