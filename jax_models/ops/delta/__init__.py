"""The delta rules: matrix-valued states that decay and are corrected."""

from typing import Annotated, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_models.checks.arguments import checked
from jax_models.ops.affine import common_carry_dtype
from jax_models.ops.delta import chunked, definition, gated_chunked, sequential
from jax_models.ops.delta.calls import (
    LOWEST_LOG_DECAY,
    DeltaRule,
    GatedDeltaRule,
    GatedSteps,
    Steps,
)
from jax_models.ops.delta.documents import run_rows
from jax_models.ops.forms import NATIVE, Form, Operator
from jax_models.ops.rows import DividedMasks, given_rows

DELTA_RULE = Operator(
    "delta_rule",
    (
        Form("sequential", sequential.run, ("cpu",), pays=sequential.pays),
        Form("chunked", chunked.run, refusal=chunked.refusal, pays=chunked.pays),
        Form("definition", definition.delta_rule),
    ),
)
GATED_DELTA_RULE = Operator(
    "gated_delta_rule",
    (
        Form("chunked", gated_chunked.run, refusal=gated_chunked.refusal, pays=gated_chunked.pays),
        Form("sequential", sequential.run_gated, ("cpu",), pays=sequential.gated_pays),
        Form("definition", definition.gated_delta_rule),
    ),
    (NATIVE,),
)
DeltaRuleMethod = Annotated[str, "auto or the name of a form"]
"""What runs a delta rule."""
GatedDeltaRuleMethod = DeltaRuleMethod
"""What runs a gated delta rule."""


@checked()
def delta_rule(
    r: Float[Array, "batch time heads key"],
    log_w: Float[Array, "batch time heads key"],
    k: Float[Array, "batch time heads key"],
    v: Float[Array, "batch time heads value"],
    a: Float[Array, "batch time heads key"] | None = None,
    b: Float[Array, "batch time heads key"] | None = None,
    state: Float[Array, "batch heads value key"] | None = None,
    *,
    u: Float[Array, "heads key"] | None = None,
    min_log_w: float | None = None,
    method: DeltaRuleMethod = "auto",
    **masks: Unpack[DividedMasks],
) -> tuple[Float[Array, "batch time heads value"], Float[Array, "batch heads value key"]]:
    """Runs a matrix S per head, which decays, is corrected, and stores a value for each key.

        >>> r, k, v = jnp.ones((3, 8, 100, 4, 64))
        >>> y, state = delta_rule(r, -k, k, v)

        S_t = S_{t−1} (diag(w_t) + a_t b_tᵀ) + v_t k_tᵀ,   w_t = exp(log_w_t)
        y_t = S_t r_t

    With a bonus u for the current step, as in RWKV-6, y reads the state before the step:

        y_t = (S_{t−1} + v_t (u ⊙ k_t)ᵀ) r_t

    The following layers are special cases. r is their query times its scale. Each step and head has
    a decay α and a rate β:

    - RWKV-7: a = −κ̂, b = κ̂ ⊙ η, where κ̂ is the removal key and η the in-context learning rate.
    - DeltaNet: log_w = 0, a = k, b = −βk, and βk takes the place of k. Gated DeltaNet differs in
      log_w = log α, the same for all features of a key, and b = −αβk. Kimi Delta Attention differs
      from DeltaNet in log_w = log α, with one α for each feature of a key, and a = α ⊙ k.
      `gated_delta_rule` computes both faster.
    - RWKV-6 (with u), gated linear attention, RetNet and Mamba-2 (the last two with the same log α
      for all features of a key): without a and b.

    Args:
        r: the receptance, or query.
        log_w: the logarithm of the decay: at most 0, and −∞ to forget everything.
        k: the keys.
        v: the values.
        a: the key with which the correction is read from the state. Give both a and b, or neither.
        b: the key with which the correction is written.
        state: S before the first step. None: zero.
        u: the bonus of the current step. None: y reads the state after the step.
        min_log_w: a lower bound, to which a smaller log_w is raised. If it is near 0 (RWKV-7's is
            −e^{−1/2}) and there is no `reset`, chunks need one matrix product instead of four.
        method: the form that runs. "definition" is a plain `lax.scan`. "sequential" is a loop for
            CPUs. "chunked" computes 16 steps at a time by matrix products (Yang et al. 2024,
            arXiv 2406.06484). "auto" chooses the form that is likely to be the fastest for the
            call, on the platform that runs the program. `ops.forms_of` shows the choice. All forms
            compute in at least float32, with the highest precision on a TPU. For the backward pass,
            the loops store √time states, or all of them if they take at most 4 MiB, and "chunked"
            stores one every 128 steps. If "chunked" runs and there is no `reset`, a NaN also
            reaches the outputs of up to 15 steps before it.
        **masks: `lengths`, `reset` and `time_axis`, or `rows`, as in `DividedMasks`. At a `reset`,
            the state restarts from zero. With a `time_axis`, the steps of a device turn S into
            `S M + E`. The devices exchange M and E, so that each can compute the S before its own
            steps and run from there.

    Returns:
        All y and the last S, in at least float32. Each y beyond `lengths` is meaningless.

    Raises:
        NotImplementedError: `lengths` are given with a `time_axis`, or the form that `method` names
            does not support the call. "chunked" takes no symbolic number of steps.
        TypeError: the dtype of an array is of another kind, only one of a and b is given, or u is
            given together with a and b.
        ValueError: a shape is wrong, a length lies outside 0 … time, min_log_w is positive, or
            there is no such method.

    Source: Peng et al. 2025 (RWKV-7, arXiv 2503.14456); Peng et al. 2024 (RWKV-6, 2404.05892).

    """
    # Check the combinations of arguments that the annotations do not cover.
    rows = given_rows(masks)
    if (a is None) != (b is None):
        raise TypeError("a, b: expected both or neither")
    if a is not None and u is not None:
        raise TypeError("u: expected None where there are a and b, which read the state before")
    if min_log_w is not None and min_log_w > 0:
        raise ValueError(f"min_log_w: expected at most 0, got {min_log_w}")
    # Compute in the widest dtype of the arguments, and leave early if there is nothing to compute.
    batch, _, heads, _ = k.shape
    dtype = common_carry_dtype(*(x for x in (r, log_w, k, v, a, b, state, u) if x is not None))
    if state is None:
        state = jnp.zeros((batch, heads, v.shape[-1], k.shape[-1]), dtype)
    if 0 in v.shape or 0 in k.shape:
        return jnp.zeros(v.shape, dtype), state.astype(dtype)
    steps = jax.tree.map(lambda x: x.astype(dtype), Steps(r, log_w, k, v, a, b))
    state, u = state.astype(dtype), u if u is None else u.astype(dtype)
    least = LOWEST_LOG_DECAY if min_log_w is None else min_log_w
    return run_rows(DELTA_RULE, method, DeltaRule(steps, state, u, least), rows)


@checked()
def gated_delta_rule(
    q: Float[Array, "batch time key_heads key"],
    k: Float[Array, "batch time key_heads key"],
    v: Float[Array, "batch time heads value"],
    log_decay: Float[Array, "batch time heads *features"],
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

    The features of a key may each have a decay, as in Kimi Delta Attention (Kimi Team 2025, arXiv
    2510.26692). Then S_{t−1} diag(α_t) takes the place of α_t S_{t−1}.

    Without a `beta`, nothing is corrected: S_t = α_t S_{t−1} + v_t k_tᵀ. This is the state space of
    Mamba-2 (Dao and Gu 2024, arXiv 2405.21060), where q, k and v are its C, B and Δ x.

    Each key head serves heads / key_heads consecutive heads.

    Args:
        q: the queries.
        k: the keys.
        v: the values.
        log_decay: the logarithm of the decay of each head, or of each feature of its keys, (batch,
            time, heads, key): at most 0, and −∞ to forget everything.
        beta: the rate at which each head learns: 1 replaces the value of a key of length 1. None:
            each step adds its value.
        state: S before the first step. None: zero.
        scale: a factor of the queries, key^−1/2 in most models.
        normalize: whether queries and keys are scaled to a length of 1 first, as by `l2_normalize`.
        method: the form that runs. "definition" is a plain `lax.scan`. "sequential" is a loop for
            CPUs. "chunked" computes 64 steps at a time by matrix products (Yang et al. 2024, arXiv
            2406.06484), or 32 without a `beta` or with a decay for each feature. "native" is the
            package `twinscan-native`, which runs on CPUs, without a `beta` and with one decay for
            each head. "auto" chooses the form that is likely to be the fastest for the call, on the
            platform that runs the program: "native" from 33 steps on, in float32 and on a single
            CPU device. `ops.forms_of` shows the choice. All forms compute in at least float32, with
            the highest precision on a TPU. For the backward pass, the loops store √time states, or
            all of them if they take at most 4 MiB, "chunked" stores one a chunk, and "native" one
            every 64 steps. If "chunked" or "native" runs and there is no `reset`, a NaN also
            reaches the outputs of up to 63 steps before it.
        **masks: `lengths`, `reset` and `time_axis`, or `rows`, as in `DividedMasks`. At a `reset`,
            the state restarts from zero. With a `time_axis`, each device runs its steps twice: once
            to find how they change any state, and once from the state after the devices before it.

    Returns:
        All y and the last S, in at least float32. Each y beyond `lengths` is meaningless.

    Raises:
        NotImplementedError: `lengths` are given with a `time_axis`, or the form that `method` names
            does not support the call. "chunked" takes no symbolic number of steps, and a decay for
            each feature only with a `beta`.
        TypeError: the dtype of an array is of another kind.
        ValueError: a shape is wrong, heads is no multiple of key_heads, a length lies outside 0 …
            time, or there is no such method.

    Source: Yang et al. 2024 (Gated DeltaNet, arXiv 2412.06464).

    """
    rows = given_rows(masks)
    batch, _, heads, values = v.shape
    if heads % k.shape[2]:
        raise ValueError(
            f"v: expected heads to be a multiple of key_heads = {k.shape[2]}, got {heads}"
        )
    if log_decay.shape[3:] not in ((), k.shape[3:]):
        by_head = v.shape[:3]
        raise ValueError(
            f"log_decay: expected shape {by_head}, a decay for each head, or "
            f"{(*by_head, k.shape[3])}, one for each feature of its keys, got {log_decay.shape}"
        )
    arrays = [x for x in (q, k, v, log_decay, beta, state) if x is not None]
    dtype = common_carry_dtype(*arrays)
    if state is None:
        state = jnp.zeros((batch, heads, values, k.shape[-1]), dtype)
    if 0 in v.shape or 0 in k.shape:
        return jnp.zeros(v.shape, dtype), state.astype(dtype)
    log_w = log_decay.astype(dtype).reshape(*v.shape[:3], -1)
    beta = None if beta is None else beta[..., None].astype(dtype)
    steps = GatedSteps(q, k, v, log_w, beta)
    call = GatedDeltaRule(steps, state.astype(dtype), normalize, scale)
    return run_rows(GATED_DELTA_RULE, method, call, rows)
