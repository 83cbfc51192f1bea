"""Gated DeltaNet's recurrence, forward and with its gradients."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from benchmarks.families.plain.plain_versions import gated_delta_step, in_pieces, over_time
from benchmarks.oracle import in_float64
from benchmarks.problem import BOTH, OURS, Contenders, Problem, operator
from jax_models.ops import delta_rule, gated_delta_rule

LEAST_LOG_DECAY = -0.6
"""The least log decay, which is that of RWKV-7."""


@dataclasses.dataclass(frozen=True)
class Recurrence(Problem):
    """Queries, keys, values, log decays and rates of these sizes."""

    batch: int
    time: int
    heads: int
    head_size: int
    rounds = 5

    @property
    def name(self) -> str:
        """The sizes, in a few words."""
        return f"{self.batch} × {self.time}, {self.heads} heads of {self.head_size}"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of y."""
        return self.batch, self.time, self.heads, self.head_size

    def arrays(self):
        """Queries, keys of length 1, values, log decays and rates."""
        rng = np.random.default_rng(0)
        q, k, v = rng.standard_normal((3, *self.shape), np.float32)
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        log_w, rate = rng.uniform(size=(2, *self.shape[:3])).astype(np.float32)
        return {
            "q": q * self.head_size**-0.5,
            "k": k,
            "v": v,
            "log_w": LEAST_LOG_DECAY * log_w,
            "rate": rate,
        }

    def cotangent(self):
        """A random gradient of y."""
        return np.random.default_rng(1).standard_normal(self.shape, np.float32)

    def oracle(self):
        """Computes the plain version in float64.

        Its states are large, so the backward pass keeps only every 128th of them.
        """

        def run(q, k, v, log_w, rate):
            xs = q, k, v, log_w, rate
            return in_pieces(gated_delta_step, self.zeros(), xs, self.time // 128)

        return in_float64(run, self.arrays(), self.cotangent())

    def zeros(self):
        """The state before the first step."""
        return jnp.zeros((self.batch, self.heads, self.head_size, self.head_size))

    def targets(self, part, platform):
        """The largest allowed ratios of our time to the peers'."""
        if platform != "cpu" or self.time < 1024:
            return {}
        forward = {"transformers, a decay a head": 0.7}
        return forward | {"lax.scan": 0.5} if part == BOTH else forward


def problems(quick: bool) -> list[Recurrence]:
    """Long sequences, or short ones in a quick run.

    For the largest, a plain scan already keeps about 3 GiB for its backward pass, and with the
    tuned allocator, both workers keep all the memory that they ever used.
    """
    if quick:
        return [Recurrence(2, 128, 2, 32)]
    return [Recurrence(4, 1024, 4, 64), Recurrence(4, 2048, 4, 64), Recurrence(1, 2048, 8, 128)]


contenders = Contenders()


def _by_method(problem: Recurrence, method):
    def run(q, k, v, log_w, rate):
        return gated_delta_rule(q, k, v, log_w, rate, method=method)[0]

    return operator(problem, run)


@contenders.jax(OURS)
def ours(problem: Recurrence):
    """Our operator for a decay a head, with its default options."""
    return _by_method(problem, "auto")


@contenders.jax(f"{OURS}, sequential")
def ours_sequential(problem: Recurrence):
    """Our operator with the method for a few steps."""
    return _by_method(problem, "sequential")


@contenders.jax(f"{OURS}, delta_rule")
def ours_by_key(problem: Recurrence):
    """Our operator for a decay a key."""

    def run(q, k, v, log_w, rate):
        log_w = jnp.broadcast_to(log_w[..., None], k.shape)
        learned = rate[..., None] * k
        corrected = -jnp.exp(log_w) * learned
        return delta_rule(q, log_w, learned, v, k, corrected, min_log_w=LEAST_LOG_DECAY)[0]

    return operator(problem, run)


@contenders.jax("lax.scan")
def plain_scan(problem: Recurrence):
    """The straightforward version in JAX."""

    def run(q, k, v, log_w, rate):
        return over_time(gated_delta_step, problem.zeros(), (q, k, v, log_w, rate))

    return operator(problem, run)


@contenders.torch("transformers, a decay a head")
def transformers_by_head(problem: Recurrence):
    """Hugging Face's chunks of 64 steps. All features of a head decay at the same rate."""
    from transformers.models.qwen3_next import (  # pyright: ignore[reportMissingImports]
        modeling_qwen3_next,
    )

    chunked = modeling_qwen3_next.torch_chunk_gated_delta_rule
    scale = problem.head_size**0.5  # the peer divides the queries by it
    return operator(
        problem, lambda q, k, v, log_w, rate: chunked(q * scale, k, v, g=log_w, beta=rate)[0]
    )


@contenders.torch("transformers, a decay a key")
def transformers_by_key(problem: Recurrence):
    """Hugging Face's Kimi Delta Attention, whose features decay separately, as ours do."""
    from transformers.models.kimi_linear import (  # pyright: ignore[reportMissingImports]
        modeling_kimi_linear,
    )

    chunked = modeling_kimi_linear.chunk_kimi_delta_attention
    scale = problem.head_size**0.5

    def run(q, k, v, log_w, rate):
        return chunked(q * scale, k, v, g=log_w[..., None].expand(k.shape), beta=rate)[0]

    return operator(problem, run)
