"""RWKV-4's average of the past."""

import math
from functools import partial

import numpy as np

from benchmarks.families.plain.pairs import run_wkv
from benchmarks.oracle import in_float64
from benchmarks.problem import FORWARD, OURS, Contenders, Sequences, Work, operator
from jax_models.ops import wkv


class WKV(Sequences):
    """Keys, values, decays and bonuses of these sizes."""

    def arrays(self):
        """k, v, w, u."""
        rng = np.random.default_rng(0)
        k, v = rng.standard_normal((2, *self.shape), np.float32)
        w = rng.uniform(0.01, 2, self.features).astype(np.float32)
        return {"k": k, "v": v, "w": w, "u": rng.standard_normal(self.features, np.float32)}

    def oracle(self):
        """Computes the definition in float64."""
        return in_float64(partial(run_wkv, "definition"), self.arrays(), self.cotangent())

    def work(self, part):
        """Reads k, v, writes y; backward reads k, v, y and its gradient, writes two gradients."""
        return Work(num_bytes=4 * math.prod(self.shape) * (3 if part == FORWARD else 9))

    def targets(self, part, platform):
        """The largest allowed ratios of our time to the peers'."""
        if self.time < 512:
            return {}
        if platform != "cpu":
            return {"limit": 0.7, f"{OURS}, associative": 1 / 3}
        return {"transformers": 0.2 if part == FORWARD else 0.05, "lax.scan": 0.9}


def problems(quick: bool) -> list[WKV]:
    """Wide features and a language model's sizes, or a short sequence in a quick run."""
    sizes = [(8, 64, 192)] if quick else [(8, 512, 512), (32, 128, 192)]
    return [WKV(*size) for size in sizes]


contenders = Contenders()


@contenders.jax(OURS)
def ours(problem: WKV):
    """Our operator with its default options."""
    return operator(problem, lambda k, v, w, u: wkv(k, v, w=w, u=u)[0])


@contenders.jax(f"{OURS}, associative")
def ours_associative(problem: WKV):
    """Our operator with the method for a time axis that must be parallel."""
    return operator(problem, lambda k, v, w, u: wkv(k, v, w=w, u=u, method="associative")[0])


@contenders.jax("lax.scan")
def plain_scan(problem: WKV):
    """The straightforward version in JAX, which is the definition."""
    return operator(problem, partial(run_wkv, "definition"))


@contenders.torch("transformers")
def transformers(problem: WKV):
    """Hugging Face's loop for CPUs, which expects log w."""
    from transformers.models.rwkv import modeling_rwkv  # pyright: ignore[reportMissingImports]

    linear_attention = modeling_rwkv.rwkv_linear_attention_cpu
    return operator(problem, lambda k, v, w, u: linear_attention(w.log(), u, k, v)[0])


@contenders.torch("torch loop")
def torch_loop(problem: WKV):
    """The loop of our torch twin, which is the straightforward version."""
    import torch

    from torch_ref.layers.rwkv import EMPTY_EXPONENT, wkv

    def loop(k, v, w, u):
        zeros = torch.zeros_like(k[:, 0])
        return wkv(k, v, w, u, (zeros, zeros, torch.full_like(zeros, EMPTY_EXPONENT)))[0]

    return operator(problem, loop)
