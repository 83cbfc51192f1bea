"""The gated delta rule: a delta rule whose heads each decay at a single rate."""

from functools import partial
from typing import Literal, Unpack

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim
from jaxtyping import Array, Float

from jax_models.checks.arguments import checked
from jax_models.ops.affine import common_carry_dtype
from jax_models.ops.delta_rule_rows import LOWEST_LOG_DECAY, isolated, run_rows
from jax_models.ops.delta_rule_steps import Steps, sequential
from jax_models.ops.gated_delta_chunk import (
    GatedSteps,
    KeyOptions,
    chunked,
    repeat_keys,
)
from jax_models.ops.rows import DividedMasks, Rows, given_rows

GatedDeltaRuleMethod = Literal["auto", "chunked", "sequential"]

FEW_STEPS = 8
"""With fewer steps, one after the other is faster than a chunk, as measured on a CPU."""


@checked()
def gated_delta_rule(
    q: Float[Array, "batch time key_heads key"],
    k: Float[Array, "batch time key_heads key"],
    v: Float[Array, "batch time heads value"],
    log_decay: Float[Array, "batch time heads"],
    beta: Float[Array, "batch time heads"] | None,
    state: Float[Array, "batch heads value key"] | None = None,
    *,
    scale: float = 1.0,
    normalize: bool = False,
    method: GatedDeltaRuleMethod = "auto",
    **masks: Unpack[DividedMasks],
) -> tuple[Float[Array, "batch time heads value"], Float[Array, "batch heads value key"]]:
    """Runs the gated delta rule.

    Each head keeps a matrix S that decays and learns a value for each key.

        >>> q, k, v = jnp.ones((3, 8, 100, 4, 64))
        >>> y, state = gated_delta_rule(q, k, v, log_decay, beta, normalize=True, scale=64**-0.5)

        S_t = α_t S_{t−1} + β_t (v_t − α_t S_{t−1} k_t) k_tᵀ,   α_t = exp(log_decay_t)
        y_t = S_t (scale q_t)

    Without a `beta`, nothing is corrected: S_t = α_t S_{t−1} + v_t k_tᵀ. This is the state space of
    Mamba-2 (Dao and Gu 2024, arXiv 2405.21060), where q, k and v are its C, B and Δ x.

    Each key head serves heads / key_heads consecutive heads.

    Args:
        q: the queries.
        k: the keys.
        v: the values.
        log_decay: the logarithm of the decay of each head: at most 0, and −∞ to forget everything.
        beta: the rate at which each head learns: 1 replaces the value of a key of length 1. None:
            each step adds its value.
        state: S before the first step. None: zero.
        scale: a factor of the queries, key^−1/2 in most models.
        normalize: whether queries and keys are scaled to a length of 1 first, as by `l2_normalize`.
        method: "sequential" runs one step after the other; "chunked" computes 64 steps at a time by
            matrix products (Yang et al. 2024, arXiv 2406.06484). "auto" is sequential with fewer
            than 8 steps, and chunked otherwise. With a symbolic number of steps, every method is
            sequential. All methods compute in at least float32, with the highest precision on a
            TPU. For the backward pass, "chunked" stores one state every 64 steps. Unless the method
            is sequential or `reset` is given, a NaN also reaches the outputs of up to 63 steps
            before it.
        **masks: `lengths`, `reset` and `time_axis`, as in `DividedMasks`. At a `reset`, the state
            restarts from zero. With a `time_axis`, each device runs its steps twice: once to find
            how they change any state, and once from the state after the devices before it.

    Returns:
        All y and the last S, in at least float32. Each y beyond `lengths` is meaningless.

    Raises:
        NotImplementedError: `lengths` are given with a `time_axis`.
        TypeError: the dtype of an array is of another kind.
        ValueError: a shape is wrong, heads is no multiple of key_heads, a length lies outside 0 …
            time, or there is no such method.

    Source: Yang et al. 2024 (Gated DeltaNet, arXiv 2412.06464).

    """
    rows = given_rows(masks)
    batch, time, heads, values = v.shape
    if heads % k.shape[2]:
        raise ValueError(
            f"v: expected heads to be a multiple of key_heads = {k.shape[2]}, got {heads}"
        )
    arrays = [x for x in (q, k, v, log_decay, beta, state) if x is not None]
    dtype = common_carry_dtype(*arrays)
    if state is None:
        state = jnp.zeros((batch, heads, values, k.shape[-1]), dtype)
    if 0 in v.shape or 0 in k.shape:
        return jnp.zeros(v.shape, dtype), state.astype(dtype)
    # Chunks need a known number of steps, and are slower for a few steps.
    if is_symbolic_dim(time) or (method == "auto" and time < FEW_STEPS):
        method = "sequential"
    log_decay, beta = jax.tree.map(lambda x: x[..., None].astype(dtype), (log_decay, beta))
    steps = GatedSteps(q, k, v, log_decay, beta)
    compiled = partial(_compiled, method, KeyOptions(normalize, scale))
    return run_rows(compiled, steps, state.astype(dtype), rows)


@partial(jax.jit, static_argnums=(0, 1))  # else eager calls would compile the scan each time
def _compiled(
    method: GatedDeltaRuleMethod, keys: KeyOptions, xs: GatedSteps, state, rows: Rows
) -> tuple[Array, Array]:
    low = xs.log_decay < LOWEST_LOG_DECAY
    xs = xs._replace(log_decay=jnp.where(low, LOWEST_LOG_DECAY, xs.log_decay))
    xs = jax.tree.map(rows.masked, xs)

    def run(xs, state):
        if rows.reset is not None:
            log_decay = jnp.where(rows.reset[..., None, None], LOWEST_LOG_DECAY, xs.log_decay)
            xs = xs._replace(log_decay=log_decay)
        return _by_method(method, keys, xs, state)

    return isolated(run, xs, state, rows.reset)


def _by_method(
    method: GatedDeltaRuleMethod, keys: KeyOptions, xs: GatedSteps, state: Array
) -> tuple[Array, Array]:
    if method != "sequential":
        return chunked(keys, xs, state)
    xs = repeat_keys(keys(xs, state.dtype), axis=2)
    log_w = jnp.broadcast_to(xs.log_decay, xs.k.shape)
    if xs.beta is None:
        return sequential(True, Steps(xs.q, log_w, xs.k, xs.v, None, None), state)
    learned = xs.beta * xs.k
    corrected = -jnp.exp(xs.log_decay) * learned
    return sequential(True, Steps(xs.q, log_w, learned, xs.v, xs.k, corrected), state)
