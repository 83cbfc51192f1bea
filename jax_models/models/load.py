"""`load_pretrained`: the model in a file or a folder, whichever family it is of."""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import jax.numpy as jnp

from jax_models.layers.rwkv_version import rwkv_version
from jax_models.models.griffin import GriffinLanguageModelConfig
from jax_models.models.hippogriff import TIME, HippogriffLanguageModelConfig
from jax_models.models.hyena_dna import HyenaDNALanguageModelConfig
from jax_models.models.language_model import LanguageModel
from jax_models.models.pretrained import ShardingOf, loaded, rwkv_config
from jax_models.models.silero_vad import SileroVAD
from jax_models.options import CheckedFields, FloatingDtype, checked_options
from jax_models.weights.checkpoint import open_checkpoint
from jax_models.weights.stored import cast, dtype_of, is_floating

SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "features",
    "num_hidden_layers": "num_layers",
    "d_model": "features",
    "n_layer": "num_layers",
}
"""The sizes in a config.json, and what our configs call them. HyenaDNA has names of its own."""


@dataclasses.dataclass(frozen=True)
class Family:
    """Models that are recognized in the same way."""

    name: str
    model_types: tuple[str, ...]
    """What a config.json calls them."""
    has: Callable[[Iterable[str]], bool]
    """Whether these are the keys of such a model."""
    config: Callable[..., Any]
    """Makes the config from the weights and the fields of a config.json, or None. Keyword arguments
    set fields of the config."""


def with_part(part: str) -> Callable[[Iterable[str]], bool]:
    """Has a key this part?"""
    return lambda keys: any(part in key for key in keys)


def griffin(weights: Mapping[str, Any], fields: Mapping[str, Any] | None, **options: Any) -> Any:
    """The window and the activation are in the config.json alone."""
    if fields is not None:
        return dataclasses.replace(GriffinLanguageModelConfig.from_hf(fields), **options)
    return GriffinLanguageModelConfig.from_state_dict(weights, **options)


@dataclasses.dataclass(frozen=True)
class SileroVADConfig(CheckedFields):
    """What a SileroVAD is built of."""

    sample_rate: Literal[16000, 8000]

    def build(self, **options: Any) -> SileroVAD:
        """The model."""
        return SileroVAD(self.sample_rate, **options)


def silero_vad(weights: Mapping[str, Any], fields: Any, **options: Any) -> SileroVADConfig:
    """The sample rate is inferred from the windows of the STFT."""
    stft = next(array for key, array in weights.items() if "stft" in key)
    config = SileroVADConfig(16000 if stft.shape[-1] == 256 else 8000)
    return dataclasses.replace(config, **options)


def rwkv(weights: Mapping[str, Any], fields: Any, **options: Any) -> Any:
    """The version is inferred from the keys."""
    return dataclasses.replace(rwkv_config(weights), **options)


def by_shapes(config: Callable[..., Any]) -> Callable[..., Any]:
    """For families whose config is read from the keys and shapes, apart from keyword arguments."""
    return lambda weights, fields, **options: config(weights, **options)


FAMILIES = (
    Family("RecurrentGemma", ("recurrent_gemma",), with_part("rg_lru"), griffin),
    Family(
        "hippogriff",
        (),
        lambda keys: any(".hawk.forget_base" in key or key.startswith(TIME) for key in keys),
        by_shapes(HippogriffLanguageModelConfig.from_state_dict),
    ),
    Family(
        "HyenaDNA",
        ("hyenadna",),
        with_part(".filter_fn.pos_emb."),
        by_shapes(HyenaDNALanguageModelConfig.from_state_dict),
    ),
    Family("silero-VAD", (), with_part("stft"), silero_vad),
    Family(
        "RWKV",
        ("rwkv", "rwkv6", "rwkv7"),
        lambda keys: rwkv_version(keys) is not None,
        rwkv,
    ),
)


@checked_options
def load_pretrained(
    path: str | os.PathLike[str],
    *,
    dtype: FloatingDtype | None = None,
    param_dtype: FloatingDtype | None = None,
    sharding: ShardingOf | None = None,
    **config: Any,
) -> LanguageModel | SileroVAD:
    """The model in a file or a folder that somebody else trained, with its weights.

        >>> from safetensors.numpy import save_file
        >>> config = RWKV7LanguageModelConfig(features=64, num_layers=1)
        >>> save_file(to_torch(config.build(rngs=nnx.Rngs(0))), "model.safetensors")
        >>> model = load_pretrained("model.safetensors")

    It reads RecurrentGemma (transformers' folders, and DeepMind's in orbax and PyTorch), RWKV-4, 6
    and 7 (BlinkDL's files, fla's, transformers'), HyenaDNA, hippogriff and silero-VAD, from
    safetensors, files of `torch.save`, both also in parts that an index names, and folders of
    orbax. Keys, shapes and the config.json tell the model. No weights are drawn. A weight is read
    when its parameter is made, so that little more than the model is in memory.

    Args:
        path: the file, or the folder with it.
        dtype: of the computation; by default the parameters', and float32 for those in float16,
            in which RWKV-4 overflows.
        param_dtype: of the parameters. None: the widest of the file. Another one rounds.
        sharding: where a parameter of a path and a shape is, as
            `lambda path, shape: NamedSharding(mesh, spec)`. None: as in `from_torch`.
        **config: fields of the model's config that the file does not contain, such as hippogriff's
            `window` or safari's `activation`.

    Raises:
        ImportError: a package that the file needs is not installed.
        TypeError: `path` is not a path, or the model's config has no such field.
        OSError: a file is missing or cannot be opened.
        ValueError: a file is damaged, it is of another model, or keys, shapes and the config.json
            contradict each other.

    """
    weights, fields = open_checkpoint(path)
    known = config_of(weights, fields, **config)
    if param_dtype is None:
        dtypes = {dtype_of(each) for each in weights.values() if is_floating(each)}
        param_dtype = functools.reduce(jnp.promote_types, dtypes) if dtypes else jnp.float32
    else:
        weights = cast(weights, param_dtype)
    if dtype is None and param_dtype == jnp.float16:
        dtype = jnp.float32
    return loaded(known, weights, dtype, param_dtype, sharding)


def config_of(weights: Mapping[str, Any], fields: Mapping[str, Any] | None, **options: Any) -> Any:
    """The config of the model with these weights and these fields of a config.json, if any.

    `options` are fields of the config that neither contains.

    Raises:
        TypeError: the config has no such field.
        ValueError: there is no such model, or the two contradict each other.

    """
    kind = (fields or {}).get("model_type")
    families = [
        family
        for family in FAMILIES
        if (family.has(weights) if kind is None else kind in family.model_types)
    ]
    names = ", ".join(family.name for family in FAMILIES)
    if not families and kind is not None:
        architectures = (fields or {}).get("architectures") or [kind]
        raise ValueError(f"config.json: expected a model of {names}, got {architectures[0]}")
    if not families:
        some = ", ".join(sorted(map(str, weights))[:3]) or "none"
        raise ValueError(f"expected the keys of {names}, got {some}, …")
    config = families[0].config(weights, fields, **options)
    for field, ours in SIZES.items():
        size = getattr(config, ours, None)
        if fields and size is not None and _size(fields, field, size) != size:
            raise ValueError(f"config.json: {field} is {fields[field]}, the weights have {size}")
    return config


def _size(fields: Mapping[str, Any], name: str, default: int) -> Any:
    """A size in a config.json; a vocabulary's is rounded up, where there is a multiple for it."""
    size = fields.get(name, default)
    if name == "vocab_size" and isinstance(multiple := fields.get("pad_vocab_size_multiple"), int):
        return -(-size // multiple) * multiple
    return size
