"""The model of a checkpoint, told by its keys."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Sharding

from jax_models.layers.rwkv_version import rwkv_version
from jax_models.models.griffin import GriffinLanguageModel, GriffinLanguageModelConfig
from jax_models.models.hyena_dna import HyenaDNALanguageModel, HyenaDNALanguageModelConfig
from jax_models.models.language_model import LanguageModel
from jax_models.models.rwkv import RWKVConfig, RWKVLanguageModelConfig, undivided
from jax_models.models.rwkv6 import RWKV6LanguageModelConfig
from jax_models.models.rwkv7 import RWKV7LanguageModelConfig
from jax_models.options import FloatingDtype, Index, checked_options
from jax_models.weights import from_torch
from jax_models.weights.keys import elsewhere, flattened
from jax_models.weights.transfer import params_of

ShardingOf = Callable[[str, tuple[int, ...]], Sharding]
"""Where a parameter of a path and a shape is."""
CONFIGS = {
    config.version: config
    for config in (RWKVLanguageModelConfig, RWKV6LanguageModelConfig, RWKV7LanguageModelConfig)
}


@checked_options
def rwkv_from_torch(
    state_dict: Mapping[str, Any],
    *,
    dtype: FloatingDtype | None = None,
    param_dtype: FloatingDtype = jnp.float32,
    rescaled_every: Index = 0,
    sharding: ShardingOf | None = None,
) -> LanguageModel:
    """The RWKV language model, of version 4, 6 or 7, whose checkpoint this is.

        >>> weights = to_torch(RWKV7LanguageModelConfig(features=64).build(rngs=nnx.Rngs(0)))
        >>> model = rwkv_from_torch(weights)

    The version, the layout and the sizes are read from the keys and the shapes. No weights are
    drawn.

    Args:
        state_dict: torch tensors or arrays by key, as `read_pth` gives them.
        dtype: of the computation; by default the parameters'.
        param_dtype: of the parameters.
        rescaled_every: `rescale_every` of transformers' model, if it had run in evaluation before
            its weights were saved: it then had divided some of them by powers of two. 0: it had
            not, as in the published checkpoints.
        sharding: where a parameter of a path and a shape is. None: as in `from_torch`.

    Raises:
        TypeError: the state_dict is no mapping.
        ValueError: it is not of an RWKV, or of a version that this package does not have, or its
            keys and shapes contradict each other.

    """
    config = rwkv_config(state_dict)
    if rescaled_every:
        state_dict = undivided(state_dict, rescaled_every)
    return loaded(config, state_dict, dtype, param_dtype, sharding)


def rwkv_config(state_dict: Mapping[str, Any]) -> RWKVConfig:
    """The config of an RWKV of whichever version; `rwkv_from_torch` says what is refused."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict: expected a mapping, got {type(state_dict).__name__}")
    version, key = rwkv_version(state_dict) or ("another model", None)
    if version not in CONFIGS:
        known = [
            {size.key for size in s.values()} for c in CONFIGS.values() for s in c.sizes.values()
        ]
        if key is None and (found := elsewhere(state_dict, known)):
            raise ValueError(f"state_dict: {found}")
        because = "" if key is None else f" (it has {key})"
        raise ValueError(
            f"state_dict: expected one of {', '.join(CONFIGS)}, got {version}{because}"
        )
    return CONFIGS[version].from_state_dict(state_dict)


@checked_options
def griffin_from_weights(
    weights: Mapping[str, Any],
    config: GriffinLanguageModelConfig | None = None,
    *,
    dtype: FloatingDtype | None = None,
    param_dtype: FloatingDtype = jnp.float32,
    sharding: ShardingOf | None = None,
) -> GriffinLanguageModel:
    """The Griffin language model whose checkpoint this is: a RecurrentGemma, or smaller.

        >>> sizes = {"features": 64, "recurrent_features": 64, "mlp_features": 96}
        >>> model = GriffinLanguageModelConfig(**sizes).build(rngs=nnx.Rngs(0))
        >>> model = griffin_from_weights(to_torch(model), model.config)

    The layout is told by the keys. No weights are drawn.

    Args:
        weights: torch tensors or arrays by key, in transformers' layout or recurrentgemma's; or
            recurrentgemma's tree of Flax variables.
        config: `GriffinLanguageModelConfig.from_hf` of a config.json, or of your own. None: what
            `GriffinLanguageModelConfig.from_state_dict` reads from the shapes.
        dtype: of the computation; by default the parameters'.
        param_dtype: of the parameters.
        sharding: where a parameter of a path and a shape is. None: as in `from_torch`.

    Raises:
        TypeError: the weights are no mapping.
        ValueError: they are of no Griffin, or their keys and shapes contradict each other or the
            config.

    """
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights: expected a mapping, got {type(weights).__name__}")
    state_dict = {key.removeprefix("params."): value for key, value in flattened(weights).items()}
    known = config or GriffinLanguageModelConfig.from_state_dict(state_dict)
    return loaded(known, state_dict, dtype, param_dtype, sharding)


@checked_options
def hyena_dna_from_weights(
    weights: Mapping[str, Any],
    config: HyenaDNALanguageModelConfig | None = None,
    *,
    dtype: FloatingDtype | None = None,
    param_dtype: FloatingDtype = jnp.float32,
    sharding: ShardingOf | None = None,
) -> HyenaDNALanguageModel:
    """The HyenaDNA whose checkpoint this is.

        >>> model = HyenaDNALanguageModelConfig(context_length=128).build(rngs=nnx.Rngs(0))
        >>> model = hyena_dna_from_weights(to_torch(model))

    The layout and the sizes, the longest sequence among them, are read from the keys and the
    shapes. No weights are drawn, unless the config has dropout.

    Args:
        weights: torch tensors or arrays by key, in any of `HyenaDNALanguageModel`'s layouts.
        config: None: what `HyenaDNALanguageModelConfig.from_state_dict` reads from the shapes.
        dtype: of the computation; by default the parameters'.
        param_dtype: of the parameters.
        sharding: where a parameter of a path and a shape is. None: as in `from_torch`.

    Raises:
        TypeError: the weights are no mapping.
        ValueError: they are of no HyenaDNA, or their keys and shapes contradict each other or the
            config.

    """
    known = config or HyenaDNALanguageModelConfig.from_state_dict(weights)
    return loaded(known, weights, dtype, param_dtype, sharding)


def loaded(
    config: Any,
    weights: Mapping[str, Any],
    dtype: Any,
    param_dtype: Any,
    sharding: ShardingOf | None,
) -> Any:
    """The model of a config with these weights, each read when its parameters are made."""

    def build() -> Any:
        return config.build(dtype=dtype, param_dtype=param_dtype, rngs=nnx.Rngs(0))

    draws_masks = any(
        getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name.endswith("dropout_rate")
    )
    model = build() if draws_masks else nnx.eval_shape(build)
    if sharding is not None:
        for path, param in params_of(model).items():
            like = param.get_value()
            place = sharding(path, like.shape)
            param.set_value(jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=place))
    return from_torch(model, weights)
