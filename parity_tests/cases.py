"""The registry: one row a twin pair. Every check and the report run over every row."""

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from torch import Tensor, nn

import torch_ref
from jax_models import (
    GRU,
    LSTM,
    RGLRU,
    RNN,
    Bidirectional,
    CausalConv1D,
    Hawk,
    HawkBlock,
    HawkLanguageModelConfig,
    LanguageModel,
    LanguageModelConfig,
    RNNLanguageModelConfig,
    RWKVBlock,
    RWKVChannelMix,
    RWKVLanguageModelConfig,
    RWKVTimeMix,
    WKVState,
    from_torch,
)

BATCH, TIME = 3, 7
DTYPES = ("float64", "float32", "bfloat16")

TorchState = tuple[Tensor, ...]
"""The leaves of the JAX layer's state, in its order, as tensors."""


def in_every_dtype(x: np.ndarray) -> np.ndarray:
    """The numbers rounded to bfloat16, so that every dtype starts from the same."""
    return x.astype(jnp.bfloat16).astype(np.float64)


def moderate_decays(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """An `a` well inside (0, 1), exact in bfloat16."""
    return in_every_dtype(rng.uniform(0.2, 0.9, shape))


def slow_decays(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """An `a` within 2⁻¹⁰ to 2⁻²³ of 1, exact in float32."""
    return 1 - 2.0 ** -rng.integers(10, 24, shape)


@dataclasses.dataclass(frozen=True)
class Case:
    """A torch twin, its JAX layer, and how the one is called like the other.

    `call(twin, x, state, lengths) -> (y, state)` takes and returns what the JAX layer does: x and y
    batch-major, the state's leaves with the layer's shapes. A state of None is the twin's own zero.
    """

    name: str
    twin: Callable[[], nn.Module]
    layer: Callable[..., Any]
    layout: str
    call: Callable[..., tuple[Tensor, TorchState]]
    packs: bool = False
    """Does the twin take `lengths`?"""
    decays: Callable[[np.random.Generator, tuple[int, ...]], np.ndarray] = moderate_decays
    """Draws the `a` of every RG-LRU in the twin."""
    dtypes: tuple[str, ...] = DTYPES
    """Those that the comparison with the twin runs in."""
    reach: int | None = None
    """Steps that an output sees, its own among them. None: all before it."""

    def build_twin(self, seed: int = 0) -> nn.Module:
        """The twin in float64, every weight and bias random and exact in bfloat16."""
        rng = np.random.default_rng(seed)
        twin = self.twin().double()
        with torch.no_grad():
            for parameter in twin.parameters():
                scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.5
                draw = scale * rng.standard_normal(tuple(parameter.shape))
                parameter.copy_(torch.from_numpy(in_every_dtype(draw)))
            for a in rg_lru_decays(twin):
                a.copy_(torch.from_numpy(self.decays(rng, tuple(a.shape))))
        return twin

    def build_layer(self, twin: nn.Module, dtype=jnp.float64):
        """The JAX layer in `dtype` with the twin's weights."""
        torch_dtype = getattr(torch, jnp.dtype(dtype).name)
        weights = {key: value.to(torch_dtype) for key, value in twin.state_dict().items()}
        return from_torch(self.abstract(dtype), weights, self.layout)

    def inputs(self, seed: int = 1, batch: int = BATCH, time: int = TIME) -> np.ndarray:
        """Random inputs: features exact in bfloat16, or tokens."""
        rng = np.random.default_rng(seed)
        layer = self.abstract()
        if isinstance(layer, LanguageModel):
            return rng.integers(0, layer.config.vocab_size, (batch, time))
        return in_every_dtype(rng.standard_normal((batch, time, layer.in_features)))

    def state(self, seed: int = 2, batch: int = BATCH):
        """A random state in the structure of the layer's, exact in bfloat16; positions stay 0."""
        rng = np.random.default_rng(seed)
        shapes = jax.eval_shape(lambda: self.abstract().init_state(batch))
        state = jax.tree.map(
            lambda s: (
                in_every_dtype(0.5 * rng.standard_normal(s.shape))
                if jnp.issubdtype(s.dtype, jnp.floating)
                else np.zeros(s.shape, s.dtype)
            ),
            shapes,
        )
        return jax.tree.map(
            lambda s: s._replace(den=np.abs(s.den) + 1) if isinstance(s, WKVState) else s,
            state,
            is_leaf=lambda s: isinstance(s, WKVState),
        )

    def abstract(self, dtype=jnp.float64):
        """The JAX layer without its weights, a new one at each call."""
        return nnx.merge(*_abstract(self, jnp.dtype(dtype)), copy=True)

    @property
    def causal(self) -> bool:
        """Does the JAX layer have a `step`?"""
        layer = self.abstract()
        return getattr(layer, "layers", layer).causal


@functools.cache
def _abstract(case: Case, dtype):
    return nnx.split(
        nnx.eval_shape(lambda: case.layer(dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0)))
    )


def rg_lru_decays(twin: nn.Module) -> list[Tensor]:
    """The `a` of every RG-LRU in the twin, to be written to."""
    return [m.a.detach() for m in twin.modules() if isinstance(m, torch_ref.RGLRU)]


def call_torch_nn(twin, x, state, lengths=None):
    """torch.nn.RNN, LSTM, GRU with `batch_first`."""
    if lengths is not None:
        x = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    if state is not None:
        state = state if isinstance(twin, nn.LSTM) else state[0]
    y, last = twin(x, state)
    if lengths is not None:
        y, _ = nn.utils.rnn.pad_packed_sequence(y, batch_first=True, total_length=TIME)
    return y, last if isinstance(last, tuple) else (last,)


def call_scratch(twin, x, state, lengths=None):
    """The time-major classes of seed 001, their states (layers, batch, features)."""
    y, last = twin(x.transpose(0, 1), *(state or ()))
    return y.transpose(0, 1), last if isinstance(last, tuple) else (last,)


def call_two_stacks(twin, x, state, lengths=None):
    """RNNBidirectional: its states are forward and backward by turns, ours one after the other."""
    h0 = None if state is None else torch.stack(state, dim=1).flatten(0, 1)
    y, last = twin(x.transpose(0, 1), h0)
    return y.transpose(0, 1), (last[0::2], last[1::2])


def call_cell(twin, x, state, lengths=None):
    """The time-major RNN of seed 004: its state has no axis of layers."""
    y, last = twin(x.transpose(0, 1), None if state is None else state[0][0])
    return y.transpose(0, 1), (last[None],)


def call_language_model(twin, tokens, state, lengths=None):
    """RNNLanguageModel: tokens to logits. The twin neither takes nor returns a state."""
    return twin(tokens)[0], ()


def call_steps(twin, x, state, lengths=None):
    """The one-step classes of seed 000, whose state is a tensor or a tuple of them."""
    zero = twin.init_state(x.shape[0])
    single = isinstance(zero, Tensor)
    if state is None:
        state = zero
    elif single:
        (state,) = state
    ys = []
    for x_t in x.unbind(1):
        y, state = twin(x_t, state)
        ys.append(y)
    return torch.stack(ys, dim=1), (state,) if single else state


def call_rglru(twin, x, state, lengths=None):
    """The seed's RGLRU, whose output is its state."""
    state = twin.init_state(x.shape[0]) if state is None else state[0]
    ys = [state := twin(x_t, state) for x_t in x.unbind(1)]
    return torch.stack(ys, dim=1), (state,)


def call_sequence(twin, x, state, lengths=None):
    """Classes with our own contract, their state a tuple."""
    return twin(x, state)


def two_stacks(num_layers: int, **kwargs) -> Bidirectional:
    """RNNBidirectional's layer."""
    return Bidirectional(
        *(RNN(5, 6, num_layers=num_layers, **kwargs) for _ in ("forward", "backward"))
    )


def seed_cases() -> list[Case]:
    """The classes of seeds 001 and 004."""
    scratch = partial(Case, layout="scratch", call=call_scratch)
    return [
        scratch("RNNScratch tanh", partial(torch_ref.RNNScratch, 5, 6), partial(RNN, 5, 6)),
        scratch(
            "RNNScratch relu",
            partial(torch_ref.RNNScratch, 5, 6, nonlinearity="relu"),
            partial(RNN, 5, 6, nonlinearity="relu"),
        ),
        scratch(
            "RNNScratch no bias",
            partial(torch_ref.RNNScratch, 5, 6, bias=False),
            partial(RNN, 5, 6, use_bias=False),
        ),
        Case(
            "RNNDeep",
            partial(torch_ref.RNNDeep, 5, 6, num_layers=3),
            partial(RNN, 5, 6, num_layers=3),
            layout="deep",
            call=call_scratch,
        ),
        Case(
            "RNNBidirectional 1 layer",
            partial(torch_ref.RNNBidirectional, 5, 6),
            partial(two_stacks, 1),
            layout="deep",
            call=call_two_stacks,
        ),
        Case(
            "RNNBidirectional 3 layers",
            partial(torch_ref.RNNBidirectional, 5, 6, num_layers=3),
            partial(two_stacks, 3),
            layout="deep",
            call=call_two_stacks,
        ),
        Case(
            "RNN U W b",
            partial(torch_ref.RNN, 5, 6),
            partial(RNN, 5, 6, recurrent_bias=False),
            layout="cell",
            call=call_cell,
        ),
        scratch("LSTMScratch", partial(torch_ref.LSTMScratch, 5, 6), partial(LSTM, 5, 6)),
        scratch(
            "LSTMScratch no bias",
            partial(torch_ref.LSTMScratch, 5, 6, bias=False),
            partial(LSTM, 5, 6, use_bias=False),
        ),
        scratch(
            "LSTMProj",
            partial(torch_ref.LSTMProj, 5, 6, 4),
            partial(LSTM, 5, 6, proj_features=4, proj_bias=True),
        ),
        scratch(
            "LSTMProj no bias",
            partial(torch_ref.LSTMProj, 5, 6, 4, bias=False),
            partial(LSTM, 5, 6, proj_features=4, use_bias=False),
        ),
        scratch("GRUScratch", partial(torch_ref.GRUScratch, 5, 6), partial(GRU, 5, 6)),
        scratch(
            "GRUScratch no bias",
            partial(torch_ref.GRUScratch, 5, 6, bias=False),
            partial(GRU, 5, 6, use_bias=False),
        ),
    ]


def torch_nn_cases() -> list[Case]:
    """torch.nn.RNN, LSTM and GRU: nonlinearity or projection × layers × directions.

    The smallest and the largest also without biases.
    """
    families = {
        "RNN tanh": (nn.RNN, RNN, {"nonlinearity": "tanh"}, {"nonlinearity": "tanh"}),
        "RNN relu": (nn.RNN, RNN, {"nonlinearity": "relu"}, {"nonlinearity": "relu"}),
        "LSTM": (nn.LSTM, LSTM, {}, {}),
        "LSTM proj": (nn.LSTM, LSTM, {"proj_size": 4}, {"proj_features": 4}),
        "GRU": (nn.GRU, GRU, {}, {}),
    }
    cases = []
    for family, (twin, layer, twin_options, options) in families.items():
        for num_layers in (1, 3):
            for bidirectional in (False, True):
                for bias in (True, False) if bidirectional == (num_layers > 1) else (True,):
                    stack = {"num_layers": num_layers, "bidirectional": bidirectional}
                    name = (
                        f"torch.nn.{family}, {num_layers} layer{'s' if num_layers > 1 else ''}"
                        f"{', both ways' if bidirectional else ''}{'' if bias else ', no bias'}"
                    )
                    cases.append(
                        Case(
                            name,
                            partial(
                                twin, 5, 6, bias=bias, batch_first=True, **stack, **twin_options
                            ),
                            partial(layer, 5, 6, use_bias=bias, **stack, **options),
                            layout="torch.nn",
                            call=call_torch_nn,
                            packs=True,
                        )
                    )
    return cases


def hawk_cases() -> list[Case]:
    """The classes of seed 000, at decays inside (0, 1) and close to 1."""
    hawk = partial(Case, layout="hawk")
    return [
        hawk("RGLRU", partial(torch_ref.RGLRU, 5), partial(RGLRU, 5), call=call_rglru),
        hawk(
            "RGLRU close to a = 1",
            partial(torch_ref.RGLRU, 6),
            partial(RGLRU, 6),
            call=call_rglru,
            decays=slow_decays,
            dtypes=("float64", "float32"),  # between 1 − 2⁻⁸ and 1 bfloat16 has no number
        ),
        *(
            hawk(
                f"CausalConv1D, kernel {size}",
                partial(torch_ref.CausalConv1d, 5, size),
                partial(CausalConv1D, 5, size),
                call=call_steps,
                reach=size,
            )
            for size in (1, 2, 4)
        ),
        *(
            hawk(
                f"Hawk, kernel {size}",
                partial(torch_ref.Hawk, 5, size),
                partial(Hawk, 5, kernel_size=size),
                call=call_steps,
            )
            for size in (1, 2, 4)
        ),
        hawk(
            "HawkBlock",
            partial(torch_ref.HawkBlock, 5, 7),
            partial(HawkBlock, 5, 7),
            call=call_steps,
        ),
    ]


def rwkv_cases() -> list[Case]:
    """RWKV-4's parts."""
    rwkv = partial(Case, layout="blinkdl", call=call_sequence)
    return [
        rwkv("RWKVTimeMix", partial(torch_ref.RWKVTimeMix, 5), partial(RWKVTimeMix, 5)),
        rwkv(
            "RWKVTimeMix by associative scan",
            partial(torch_ref.RWKVTimeMix, 5),
            partial(RWKVTimeMix, 5, method="associative"),
        ),
        rwkv(
            "RWKVChannelMix",
            partial(torch_ref.RWKVChannelMix, 5, 7),
            partial(RWKVChannelMix, 5, 7),
            reach=2,
        ),
        rwkv("RWKVBlock", partial(torch_ref.RWKVBlock, 5, 7, first=True), partial(RWKVBlock, 5, 7)),
    ]


def language_model_case(config: LanguageModelConfig, name: str, layout: str) -> Case:
    """A language model of this config and the twin that the config describes."""
    twin = getattr(torch_ref, type(config).__name__.removesuffix("Config"))
    return Case(
        name,
        partial(twin.from_config, config),
        config.build,
        layout=layout,
        call=call_language_model,
    )


def language_model_cases() -> list[Case]:
    """A model of every kind."""
    rnn = partial(RNNLanguageModelConfig, vocab_size=11)
    return [
        language_model_case(RNNLanguageModelConfig(), "RNNLanguageModel", "scratch"),
        language_model_case(
            rnn(context_length=None, cell="lstm", num_layers=2),
            "RNNLanguageModel of LSTM",
            "torch.nn",
        ),
        language_model_case(
            rnn(context_length=9, cell="gru"), "RNNLanguageModel of GRU", "torch.nn"
        ),
        language_model_case(
            HawkLanguageModelConfig(vocab_size=11, features=6, num_layers=2, mlp_features=8),
            "HawkLanguageModel",
            "hawk",
        ),
        language_model_case(
            RWKVLanguageModelConfig(vocab_size=11, features=6, num_layers=2, hidden_features=8),
            "RWKVLanguageModel",
            "blinkdl",
        ),
    ]


CASES = {
    case.name: case
    for case in [
        *seed_cases(),
        *torch_nn_cases(),
        *hawk_cases(),
        *rwkv_cases(),
        *language_model_cases(),
    ]
}
