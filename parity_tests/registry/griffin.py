"""RecurrentGemma's layers, blocks and language model."""

import dataclasses
from functools import partial

import jax.numpy as jnp

from jax_models import (
    RGLRU,
    GriffinBlock,
    GriffinLanguageModelConfig,
    GriffinRecurrence,
    LocalAttention,
)
from parity_tests.registry.case import paired
from parity_tests.registry.mutation import (
    CUT,
    DOCUMENTS,
    Mutation,
    edited,
    epsilon_doubled,
    identity,
    mask_ignored,
    replaced,
    without_1,
    zeroed,
)

griffin = partial(paired, layout="hf", architecture="griffin")
WINDOW = 3
attention = {"num_kv_heads": 2, "window": WINDOW, "rope_theta": 10.0, "use_bias": True}
block = {"recurrent_features": 6, "num_kv_heads": 1, "window": WINDOW, "rope_theta": 10.0}
config = GriffinLanguageModelConfig(
    vocab_size=11,
    features=8,
    num_layers=3,
    mlp_features=7,
    block_types=("recurrent", "attention"),
    recurrent_features=6,
    num_heads=2,
    window=WINDOW,
    rope_theta=10.0,
    logits_soft_cap=2.0,
)


def begun(state):
    """A state at position 5 instead of 0, as if some steps had been taken."""
    return state._replace(position=state.position + 5)


CASES = [
    griffin("RGLRU of blocks", partial(RGLRU, 6, num_blocks=2)),
    griffin("RGLRU of RecurrentGemma", partial(RGLRU, 6, num_blocks=2, scale_first_step=False)),
    griffin("LocalAttention", partial(LocalAttention, 32, 4, **attention), prefix=5, reach=WINDOW),
    griffin(
        "GriffinRecurrence", partial(GriffinRecurrence, 5, 2, hidden_features=6), valid_state=begun
    ),
    griffin("GriffinBlock, recurrent", partial(GriffinBlock, 8, 7, 2, **block), valid_state=begun),
    griffin(
        "GriffinBlock, attention",
        partial(GriffinBlock, 8, 7, 2, mixing="attention", **block),
        prefix=5,
        reach=WINDOW,
    ),
    griffin(
        "GriffinLanguageModel",
        config.build,
        architecture="griffin_language_model",
        twin_state=False,
        prefix=5,
    ),
]


def all_steps_scaled(rg_lru):
    """Scales the input by √(1 − a²) at the first step of a document, too."""
    return lambda *args, first=None, **options: rg_lru(*args, **options)


def gates_of_transposed_blocks(layer):
    """Transposes the blocks of the input gate's kernel."""
    kernel = layer.temporal_block.rglru.input_gate.kernel
    kernel[...] = kernel[...].mT


def rotating_neighbors(rotary):
    """Rotates features 2i and 2i + 1 together, as some other models do."""

    def wrong(x, positions, *, rotated, **options):
        index = jnp.arange(rotated).reshape(rotated // 2, 2).T.reshape(-1)
        index = jnp.concatenate([index, jnp.arange(rotated, x.shape[-1])])
        x = rotary(x[..., index], positions, rotated=rotated, **options)
        return x[..., jnp.argsort(index)]

    return wrong


def rotating_whole_heads(rotary):
    """Rotates all features of a head instead of a part of them."""
    return lambda x, positions, *, rotated, **options: rotary(
        x, positions, rotated=x.shape[-1], **options
    )


def heads_in_turns(local_attention):
    """Assigns the key heads to query heads in turns, instead of to neighboring query heads."""

    def wrong(q, k, v, state, **masks):
        order = jnp.arange(q.shape[2]).reshape(k.shape[2], -1).T.reshape(-1)
        y, state = local_attention(q[:, :, order], k, v, state, **masks)
        return y[:, :, jnp.argsort(order)], state

    return wrong


def one_step_further(causal_attention):
    """Makes the window one step longer, as if it did not include the current step."""

    def wrong(call, *options):
        first = jnp.where(call.first > 0, call.first - 1, call.first)
        longer = dataclasses.replace(call, first=first, window=call.window + 1)
        return causal_attention(longer, *options)

    return wrong


def written_from_slot_0(written):
    """Writes the keys and values of each call from the first slot of the cache on."""

    def wrong(state, *args):
        after = written(state._replace(position=state.position * 0), *args)
        return after._replace(position=written(state, *args).position)

    return wrong


def positions_that_go_on(positions):
    """Counts positions from the beginning of a row instead of that of each document."""
    return lambda rows, *args: positions(dataclasses.replace(rows, reset=None), *args)


def with_exact_gelu(layer):
    """Computes GELU with erf, whereas the twin uses the approximation with tanh."""
    layer.activation = "gelu"


def scale_not_rounded(layer):
    """Scales embeddings by √features in full precision, whereas the twin rounds it to bfloat16."""
    layer.embedding_scale = layer.config.features**0.5


weights = partial(Mutation, kind="weights")
forward = partial(Mutation, kind="forward")
states = partial(Mutation, kind="states and masks")
LOCAL = "jax_models.ops.attention.local_attention"

MUTATIONS = [
    weights("a gate's bias forgotten", "RGLRU of blocks", plant=zeroed("recurrence_gate.bias")),
    weights(
        "blocks of a gate transposed",
        "GriffinBlock, recurrent",
        plant=edited(gates_of_transposed_blocks),
        culprit="temporal_block.rg_lru",
    ),
    weights(
        "output's bias forgotten",
        "GriffinLanguageModel",
        plant=zeroed("blocks.2.temporal_block.out_proj.bias"),
        culprit="model.layers.2.temporal_block.o_proj",
    ),
    forward(
        "norm's weight without 1",
        "GriffinBlock, recurrent",
        plant=replaced("jax_models.layers.norm.ZeroCenteredRMSNorm.scaled", without_1),
        culprit="temporal_pre_norm",
    ),
    forward(
        "epsilon doubled",
        "GriffinLanguageModel",
        plant=epsilon_doubled("blocks.1.channel_pre_norm"),
        culprit="model.layers.1.channel_pre_norm",
    ),
    forward("exact gelu", "GriffinRecurrence", plant=edited(with_exact_gelu)),
    forward(
        "embeddings' scale not rounded", "GriffinLanguageModel", plant=edited(scale_not_rounded)
    ),
    forward(
        "logits not capped",
        "GriffinLanguageModel",
        plant=replaced("jax_models.models.language_model.capped", identity),
    ),
    forward(
        "first step scaled",
        "RGLRU of RecurrentGemma",
        plant=replaced("jax_models.ops.rg_lru", all_steps_scaled),
    ),
    forward(
        "first step scaled",
        "GriffinLanguageModel",
        plant=replaced("jax_models.ops.rg_lru", all_steps_scaled),
        culprit="model.layers.0.temporal_block.rg_lru",
    ),
    *(
        forward(name, "LocalAttention", plant=replaced(target, wrong))
        for name, target, wrong in (
            ("neighbouring features turned", "jax_models.ops.rotary", rotating_neighbors),
            ("whole heads turned", "jax_models.ops.rotary", rotating_whole_heads),
            ("key heads in turns", "jax_models.ops.local_attention", heads_in_turns),
            ("window off by one", f"{LOCAL}.causal_attention", one_step_further),
        )
    ),
    states(
        "pieces begin at slot 0",
        "LocalAttention",
        plant=replaced(f"{LOCAL}._written", written_from_slot_0),
        check=CUT,
    ),
    states(
        "positions of the row",
        "GriffinRecurrence",
        plant=replaced("jax_models.ops.Rows.positions", positions_that_go_on),
        check=DOCUMENTS,
    ),
    *mask_ignored("RGLRU of blocks", "jax_models.ops.linear.rg_lru.linear_recurrence"),
    *mask_ignored("LocalAttention", "jax_models.ops.local_attention"),
    *mask_ignored("GriffinRecurrence", "jax_models.ops.causal_conv"),
]

COMPARED = {"LocalAttention": partial(LocalAttention, num_heads=4, window=128)}
