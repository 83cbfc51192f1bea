"""HyenaDNA's operator, block and language model."""

from functools import partial

import jax.numpy as jnp
from flax import nnx

from jax_models import HyenaDNABlock, HyenaDNALanguageModelConfig, HyenaDNAMixer
from parity_tests.registry.case import paired
from parity_tests.registry.hyena import MAX_LENGTH, silenced
from parity_tests.registry.mutation import (
    STEPS,
    TRAJECTORY,
    Mutation,
    edited,
    epsilon_doubled,
    replaced,
    transposed,
    zeroed,
)

hyena_dna = partial(
    paired,
    layout="hyena-dna",
    architecture="hyena_dna",
    twin_state=False,
    prefix=20,
    mixes_steps=True,
)
network = {"embed_features": 5, "num_filter_layers": 3}
of_safari = {
    "kernel_size": 5,
    "modulate": False,
    "normalized": True,
    "filter_bias": False,
    "activation": "gelu",
}
config = HyenaDNALanguageModelConfig(
    vocab_size=11,
    context_length=13,
    features=6,
    num_layers=2,
    mlp_features=9,
    embed_features=5,
    filter_features=7,
    num_filter_layers=3,
)
CASES = [
    *(
        hyena_dna(
            f"HyenaDNAMixer, order {order}, {layout}",
            partial(HyenaDNAMixer, 5, MAX_LENGTH, order=order, mlp_features=6, **network),
            layout=layout,
        )
        for order, layout in ((3, "hyena-dna"), (2, "safari"))
    ),
    hyena_dna(
        "HyenaDNAMixer, safari's options",
        partial(HyenaDNAMixer, 5, MAX_LENGTH, mlp_features=6, **network, **of_safari),
        layout="safari",
    ),
    hyena_dna(
        "HyenaDNABlock", partial(HyenaDNABlock, 5, 8, MAX_LENGTH, filter_features=6, **network)
    ),
    hyena_dna(
        "HyenaDNALanguageModel", config.build, architecture="hyena_dna_language_model", prefix=5
    ),
]


def gates_in_order(operator):
    """Applies the gates in order, instead of the last one first."""
    return lambda layer, u, gates, v, convolve: operator(
        layer, u, [gates[0], *reversed(gates[1:])], v, convolve
    )


def product_after(operator):
    """Computes `x ⊙ (h ∗ v)`, as the Annotated Hyena does."""

    def wrong(layer, u, gates, v, convolve):
        first, *others = gates
        for n, x in enumerate(reversed(others)):
            v = x * convolve(n, v)
        return layer.output(v * first)

    return wrong


def without_activation(layer):
    """Passes the product to the output projection without an activation."""
    layer.activation = "identity"


def not_normalized(layer):
    """Does not normalize the outputs of the filter network."""
    layer.filter.normalized = False


def bias_used(layer):
    """Adds the bias B although this layer should not."""
    layer.filter_bias = True


def signed_decay(absolute):
    """Uses δ instead of |δ|."""
    return lambda x: x


def no_shift(layer):
    """Removes the shift of the window, which then decays to 0."""
    layer.mixer.filter.shift = 0.0


def another_sine(layer):
    """Resets the frequency of the sines to its initial value."""
    freq = layer.mixer.filter.freq
    freq[...] = jnp.full_like(freq[...], 10)


def train_decay(layer):
    """Trains the decays of a filter, which are buffers in torch."""
    layer.mixer.filter.deltas = nnx.Param(layer.mixer.filter.deltas[...])


of_mixer = partial(Mutation, case="HyenaDNAMixer, order 3, hyena-dna")
of_options = partial(Mutation, case="HyenaDNAMixer, safari's options", kind="forward")
of_block = partial(Mutation, case="HyenaDNABlock")
of_model = partial(Mutation, case="HyenaDNALanguageModel")
MIXER = "jax_models.layers.hyena_dna.HyenaDNAMixer.operator"

MUTATIONS = [
    of_mixer("B forgotten", kind="weights", plant=zeroed("B"), culprit=""),
    of_block(
        "another frequency",
        kind="weights",
        plant=edited(another_sine),
        culprit="mixer.filter_fn.implicit_filter.1",
    ),
    of_model(
        "output projection transposed",
        kind="weights",
        plant=transposed("blocks.1.mixer.proj_output.kernel"),
        culprit="backbone.layers.1.mixer.out_proj",
    ),
    of_options("no activation", plant=edited(without_activation)),
    of_options("filter not normalized", plant=edited(not_normalized)),
    of_options("unused bias added", plant=edited(bias_used)),
    of_mixer("gates in order", kind="forward", plant=replaced(MIXER, gates_in_order)),
    of_mixer("product after the convolution", kind="forward", plant=replaced(MIXER, product_after)),
    of_block("decays signed", kind="forward", plant=replaced("jax.numpy.abs", signed_decay)),
    of_block("window without shift", kind="forward", plant=edited(no_shift)),
    of_block(
        "exact gelu",
        kind="forward",
        plant=replaced("jax.nn.gelu", lambda gelu: partial(gelu, approximate=False)),
        culprit="mlp",
    ),
    of_model(
        "epsilon doubled",
        kind="forward",
        plant=epsilon_doubled("blocks.1.norm2"),
        culprit="backbone.layers.1.norm2",
    ),
    *(
        of_mixer(
            f"online convolution without its {name}",
            kind="states and masks",
            plant=replaced(f"jax_models.ops.conv.online_conv.{function}", silenced),
            check=STEPS,
        )
        for name, function in (("tiles", "_tile"), ("steps ahead", "_ahead"))
    ),
    of_block("a constant trained", kind="training", plant=edited(train_decay), check=TRAJECTORY),
]
