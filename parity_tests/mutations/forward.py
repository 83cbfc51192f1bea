"""Equations that are not quite the twin's."""

from functools import partial

import jax
import jax.numpy as jnp

from jax_models.ops.layer_norm_lstm import layer_norm
from parity_tests.mutations.mutation import Mutation, Plant, at, edited, replaced

PAST_AND_FUTURE = "future has no influence and far past has"


def forward_mutations() -> list[Mutation]:
    """What an equation may get wrong."""
    forward = partial(Mutation, kind="forward")
    explicit_hyena = "AuthenticHyenaBlock, explicit, order 2"
    return [
        forward(
            "relu for tanh",
            "RNNScratch tanh",
            plant=replaced("jax_models.ops.rnn.STEPS", lambda steps: {"tanh": steps["relu"]}),
        ),
        forward("half of c", "RGLRU", plant=edited(halve_c)),
        forward(
            "√(1 − a²) as it is printed",
            "RGLRU close to a = 1",
            plant=replaced("jax_models.ops.rg_lru.decay", lambda _: decay_as_printed),
            dtypes=("float32",),
        ),
        forward("gelu by tanh", "Hawk, kernel 1", plant=replaced("jax_models.ops.gelu", by_tanh)),
        *(
            forward(name, "RWKVTimeMix", plant=replaced("jax_models.ops.wkv", wrong))
            for name, wrong in (
                ("no bonus", without_bonus),
                ("decay 1e-9 larger", with_a_faster_decay),
                ("values late by a step", with_late_values),
            )
        ),
        forward(
            "|k| for max(k, 0)", "RWKVChannelMix", plant=replaced("jax.nn.relu", lambda _: jnp.abs)
        ),
        *(
            forward(
                f"hyper network {name}",
                "HyperLSTM 1 layer",
                plant=replaced("jax_models.ops.hyper_lstm", with_hyper_kernel(wrong)),
            )
            for name, wrong in (("of [x, h]", x_before_h), ("with gate f before i", f_before_i))
        ),
        *(
            forward(
                "normalised cell carried",
                case,
                plant=replaced(f"jax_models.ops.{module}.layer_norm_cell", carrying_normalised),
            )
            for case, module in (
                ("LayerNormLSTM", "layer_norm_lstm"),
                ("HyperLSTM 1 layer", "hyper_lstm"),
            )
        ),
        forward(
            "gates not normalised",
            "HyenaBlock, order 1, kernel 4",
            plant=replaced("jax_models.layers.hyena.normalized", lambda _: lambda x: x),
        ),
        *(
            forward(
                f"convolution {name}",
                explicit_hyena,
                plant=replaced(
                    [
                        f"jax_models.ops.{module}.fft_conv"
                        for module in ("long_conv", "online_conv")
                    ],
                    wrong,
                ),
                check=check,
            )
            for name, wrong, check in (
                ("over the features", over_the_features, PAST_AND_FUTURE),
                ("around a circle", around_a_circle, PAST_AND_FUTURE),
                ("around a circle", around_a_circle, "steps equal sequence"),
                ("over the rows, too", over_the_rows, "batch rows are independent"),
            )
        ),
        forward(
            "queries and keys swapped",
            "SelfAttentionBlock",
            plant=replaced("jax_models.ops.attention", keys_for_queries),
        ),
        forward(
            "head of another matrix",
            "GPModel of hyena",
            plant=replaced("jax_models.GPModel.head", lambda _: head_of_positions),
        ),
        *(
            forward("epsilon doubled", case, plant=epsilon_doubled(path), culprit=culprit)
            for case, path, culprit in (
                ("RWKVBlock", "ln2", "ln2"),
                ("RNNLanguageModel", "norm", "layer_norm"),
                (
                    "HawkLanguageModel",
                    "layers.layers.1.temporal_pre_norm",
                    "blocks.1.temporal_pre_norm",
                ),
                ("GPModel of attention", "layers.layers.1.ln1", "layers.1.ln1"),
            )
        ),
        forward(
            "gelu by tanh",
            "GPModel of attention",
            plant=replaced("jax_models.ops.gelu", by_tanh),
            culprit="layers.0.mlp",
        ),
        forward(
            "token shift late by a step",
            "RWKVLanguageModel",
            plant=replaced("jax_models.ops.delayed", late_by_a_step),
            culprit="blocks.0.att",
        ),
    ]


def epsilon_doubled(path: str) -> Plant:
    """A norm with another epsilon."""

    def edit(layer):
        at(layer, path).epsilon *= 2

    return edited(edit)


def halve_c(layer):
    """An RG-LRU that forgets half as fast."""
    layer.c /= 2


def decay_as_printed(a, exponent):
    """Its digits are lost in float32."""
    p = jnp.broadcast_to(a, exponent.shape) ** exponent
    return p, jnp.sqrt(1 - p**2)


def by_tanh(_):
    """The approximation, which is jax's default."""
    return jax.nn.gelu


def without_bonus(wkv):
    """The current step has no weight of its own."""
    return lambda k, v, state, *, u, **options: wkv(k, v, state, u=jnp.zeros_like(u), **options)


def with_a_faster_decay(wkv):
    """The past fades a little faster."""
    return lambda k, v, state, *, w, **options: wkv(k, v, state, w=w + 1e-9, **options)


def with_late_values(wkv):
    """Each step with the value of the step before."""
    return lambda k, v, *args, **options: wkv(k, jnp.roll(v, 1, axis=1), *args, **options)


def with_hyper_kernel(wrong):
    """A HyperLSTM whose hyper network has another kernel."""

    def faulty(hyper_lstm):
        def hyper_lstm_with_kernel(x, state, *, hyper_kernel_ih, **options):
            return hyper_lstm(x, state, hyper_kernel_ih=wrong(x, hyper_kernel_ih), **options)

        return hyper_lstm_with_kernel

    return faulty


def x_before_h(x, kernel):
    """As if the hyper network read [x, h]."""
    return jnp.roll(kernel, -x.shape[-1], axis=0)


def f_before_i(x, kernel):
    """The first two gates in each other's place."""
    i, f, g, o = jnp.split(kernel, 4, axis=1)
    return jnp.concatenate([f, i, g, o], axis=1)


def carrying_normalised(layer_norm_cell):
    """C is carried as h sees it."""

    def cell(gates, c, norms):
        state = layer_norm_cell(gates, c, norms)
        return state._replace(c=layer_norm(state.c, norms.cell_scale, norms.cell_bias))

    return cell


def over_the_features(fft_conv):
    """Along the wrong axis: no step sees another."""
    return lambda method, v, h: jnp.swapaxes(
        fft_conv(method, jnp.swapaxes(v, 1, 2), jnp.swapaxes(h, 0, 1)), 1, 2
    )


def around_a_circle(_):
    """Without room for what wraps around: the end reaches the beginning."""
    return lambda method, v, h: jnp.fft.irfft(jnp.fft.rfft(v) * jnp.fft.rfft(h)[None], v.shape[-1])


def over_the_rows(fft_conv):
    """Each row's outputs with a little of another's."""
    return lambda method, v, h: fft_conv(method, v + 1e-6 * jnp.roll(v, 1, axis=0), h)


def keys_for_queries(attention):
    """Scores of the wrong side."""
    return lambda q, k, *args, **options: attention(k, q, *args, **options)


def head_of_positions(self, x):
    """Tied to the embedding of the positions."""
    return x @ self.pos_embedding.embedding[: self.config.vocab_size].T


def late_by_a_step(delayed):
    """Each step with the input of two steps before."""

    def late(*args, **options):
        (previous, current), state = delayed(*args, **options)
        return (jnp.roll(previous, 1, axis=1), current), state

    return late
