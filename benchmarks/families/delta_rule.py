"""The recurrences of Gated DeltaNet, Kimi Delta Attention and Mamba-2, with their gradients."""

import dataclasses
from functools import partial

import jax.numpy as jnp
import numpy as np

from benchmarks.oracle import in_float64
from benchmarks.problem import (
    BOTH,
    NATIVE,
    OURS,
    Contenders,
    Problem,
    operator,
)
from jax_models.ops import delta_rule, gated_delta_rule

LEAST_LOG_DECAY = -0.6
"""The least log decay, which is that of RWKV-7."""
DEFINITION, MAMBA2 = "lax.scan", "transformers, Mamba-2"
BY_HEAD, BY_KEY = "transformers, a decay a head", "transformers, a decay a feature"
STEP_BY_STEP, OURS_BY_KEY = f"{OURS}, sequential", f"{OURS}, delta_rule"
"""The names of contenders."""


@dataclasses.dataclass(frozen=True)
class Recurrence(Problem):
    """Queries, keys, values, log decays and rates of these sizes."""

    batch: int
    time: int
    heads: int
    head_size: int
    rounds = 5
    solved_by = (OURS, STEP_BY_STEP, DEFINITION, BY_HEAD)

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
        """Computes the definition in float64."""
        return in_float64(partial(rule, "definition"), self.arrays(), self.cotangent())

    def targets(self, part, platform):
        """The largest allowed ratios of our time to the peers'."""
        if platform != "cpu" or self.time < 1024:
            return {}
        forward = {BY_HEAD: 0.7}
        return forward | {DEFINITION: 0.5} if part == BOTH else forward


@dataclasses.dataclass(frozen=True)
class DecayByFeature(Recurrence):
    """The recurrence of Kimi Delta Attention: each feature of a key has a log decay."""

    solved_by = (OURS, OURS_BY_KEY, DEFINITION, BY_KEY)

    @property
    def name(self) -> str:
        """The sizes, in a few words."""
        return f"a decay a feature, {super().name}"

    def arrays(self):
        """Log decays for each feature of a key, and the rest as in `Recurrence`."""
        log_w = np.random.default_rng(2).uniform(LEAST_LOG_DECAY, 0, self.shape)
        return super().arrays() | {"log_w": log_w.astype(np.float32)}

    def targets(self, part, platform):
        """The largest allowed ratios of our time to the peers'."""
        if platform != "cpu" or self.time < 1024:
            return {}
        return {OURS_BY_KEY: 0.5} if part == BOTH else {DEFINITION: 1.0}


@dataclasses.dataclass(frozen=True)
class StateSpace(Recurrence):
    """Mamba-2's recurrence: C, B, Δ x and Δ A of these sizes."""

    groups: int
    state_size: int
    solved_by = (OURS, NATIVE, DEFINITION, MAMBA2)

    @property
    def name(self) -> str:
        """The sizes, in a few words."""
        return f"Mamba-2, {super().name}, {self.groups} groups, state of {self.state_size}"

    def arrays(self):
        """C, B, Δ x and Δ A, under the names of the operator."""
        rng = np.random.default_rng(0)
        groups = self.batch, self.time, self.groups, self.state_size
        q, k = rng.standard_normal((2, *groups), np.float32) * np.float32(self.state_size**-0.5)
        v = rng.standard_normal(self.shape, np.float32)
        log_w = LEAST_LOG_DECAY * rng.uniform(0.01, 1, self.shape[:3]).astype(np.float32)
        return {"q": q, "k": k, "v": v, "log_w": log_w}

    def targets(self, part, platform):
        """The largest allowed ratios of our time to the peers'."""
        if platform != "cpu" or self.time < 1024:
            return {}
        return {MAMBA2: 0.25} if part == BOTH else {DEFINITION: 0.5}


def rule(method: str, q, k, v, log_w, rate=None):
    """The operator for a decay of each head or of each feature of its keys."""
    return gated_delta_rule(q, k, v, log_w, rate, method=method)[0]


def problems(quick: bool) -> list[Recurrence]:
    """Long sequences, or short ones in a quick run."""
    if quick:
        return [
            Recurrence(2, 128, 2, 32),
            DecayByFeature(2, 128, 2, 32),
            StateSpace(1, 128, 4, 32, 2, 64),
        ]
    return [
        Recurrence(4, 2048, 4, 64),
        Recurrence(1, 2048, 8, 128),
        DecayByFeature(1, 1024, 8, 64),
        *(StateSpace(1, 1024, 24, 64, groups, 128) for groups in (1, 8)),
    ]


contenders = Contenders()


@contenders.jax(OURS)
def ours(problem: Recurrence):
    """Our operator, with its default options."""
    return operator(problem, partial(rule, "auto"))


@contenders.jax(STEP_BY_STEP)
def ours_sequential(problem: Recurrence):
    """Our operator with its loop for CPUs."""
    return operator(problem, partial(rule, "sequential"))


@contenders.jax(NATIVE, kernels=True)
def ours_native(problem: StateSpace):
    """Our operator by the kernels of twinscan-native."""
    return operator(problem, partial(rule, "native"))


@contenders.jax(OURS_BY_KEY)
def ours_by_key(problem: DecayByFeature):
    """Our operator for corrections under any key."""

    def run(q, k, v, log_w, rate):
        learned = rate[..., None] * k
        left = jnp.exp(log_w) * k
        return delta_rule(q, log_w, learned, v, left, -learned, min_log_w=LEAST_LOG_DECAY)[0]

    return operator(problem, run)


@contenders.jax(DEFINITION)
def definition(problem: Recurrence):
    """The definition of our operator, which is a plain scan over the steps."""
    return operator(problem, partial(rule, "definition"))


@contenders.torch(BY_HEAD)
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


@contenders.torch(BY_KEY)
def transformers_by_key(problem: DecayByFeature):
    """Hugging Face's Kimi Delta Attention, in chunks."""
    from transformers.models.kimi_linear import (  # pyright: ignore[reportMissingImports]
        modeling_kimi_linear,
    )

    chunked = modeling_kimi_linear.chunk_kimi_delta_attention
    scale = problem.head_size**0.5

    return operator(
        problem, lambda q, k, v, log_w, rate: chunked(q * scale, k, v, g=log_w, beta=rate)[0]
    )


@contenders.torch(MAMBA2)
def transformers_mamba2(problem: StateSpace):
    """Hugging Face's chunks of 64 steps, their fastest size. They multiply x by Δ themselves."""
    import torch
    from transformers.models.mamba2 import (  # pyright: ignore[reportMissingImports]
        modeling_mamba2,
    )

    def run(q, k, v, log_w):
        A, delta = -torch.ones(problem.heads), -log_w
        return modeling_mamba2.mamba2_chunk_scan(
            v / delta[..., None], delta, A, B=k, C=q, chunk_size=64
        )

    return operator(problem, run)
