"""The training step of a language model by character: two layers of LSTM, AdamW."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.problem import OURS, Call, Contenders, Problem, Work
from jax_models import RNNLanguageModelConfig, from_torch, to_torch
from train.mesh import MeshConfig, build_mesh
from train.optimizer import OptimizerConfig, build_optimizer
from train.step import Trainer

PART = "training step"


@dataclasses.dataclass(frozen=True)
class CharLM(Problem):
    """A model whose embeddings and hidden states have the same size."""

    vocab: int
    hidden: int
    num_layers: int
    batch: int
    time: int
    parts = (PART,)

    @property
    def name(self) -> str:
        """The number of layers and the sizes."""
        sizes = f"V{self.vocab} H{self.hidden} B{self.batch} T{self.time}"
        return f"{self.num_layers}-layer LSTM, {sizes}"

    @property
    def config(self) -> RNNLanguageModelConfig:
        """The config of our model and of the twin."""
        return RNNLanguageModelConfig(
            vocab_size=self.vocab,
            context_length=None,
            embedding_features=self.hidden,
            hidden_features=self.hidden,
            cell="lstm",
            num_layers=self.num_layers,
        )

    def arrays(self):
        """The weights under the keys of the torch twin."""
        rng, bound, gates = np.random.default_rng(0), 1 / math.sqrt(self.hidden), 4 * self.hidden

        def uniform(*shape: int, around: float = 0.0) -> np.ndarray:
            return (around + rng.uniform(-bound, bound, shape)).astype(np.float32)

        recurrent = {
            f"rnn.{name}_l{layer}": uniform(*shape)
            for layer in range(self.num_layers)
            for name, shape in {
                "weight_ih": (gates, self.hidden),
                "weight_hh": (gates, self.hidden),
                "bias_ih": (gates,),
                "bias_hh": (gates,),
            }.items()
        }
        return {
            "embedding.weight": rng.standard_normal((self.vocab, self.hidden), np.float32),
            **recurrent,
            "layer_norm.weight": uniform(self.hidden, around=1.0),
            "layer_norm.bias": uniform(self.hidden),
            "proj.weight": uniform(self.vocab, self.hidden),
            "proj.bias": uniform(self.vocab),
        }

    def tokens(self) -> np.ndarray:
        """The batch that every step trains on, (batch, time + 1)."""
        shape = (self.batch, self.time + 1)
        return np.random.default_rng(1).integers(self.vocab, size=shape, dtype=np.int32)

    def oracle(self):
        """The loss of the first step, and the weights after it."""
        return torch_steps(self, "float64").result()

    def work(self, part):
        """The matrix products, once forward and twice backward."""
        per_token = self.num_layers * 2 * self.hidden * 4 * self.hidden + self.hidden * self.vocab
        return Work(flops=3 * 2 * self.batch * self.time * per_token)

    def targets(self, part, platform):
        """The largest allowed ratios of our time to the peers'."""
        if platform != "cpu":
            return {"torch": 1.05}
        return {"torch": 1.15, "nnx + optax": 0.65, "limit": 0.65}


def problems(quick: bool) -> list[CharLM]:
    """The model that has targets, or a quarter of its width in a quick run."""
    return [CharLM(65, 128 if quick else 512, 2, 32, 128)]


contenders = Contenders()


@contenders.jax(OURS)
def ours(problem: CharLM) -> Call:
    """Our `train.step.Trainer`."""
    model = from_torch(problem.config.build(rngs=nnx.Rngs(0)), problem.arrays())
    trainer = Trainer(
        model,
        build_optimizer(OptimizerConfig(), num_steps=1000),
        mesh=build_mesh(MeshConfig(), rows=problem.batch, window=1, devices=jax.devices()[:1]),
        seed=0,
    )
    tokens = trainer.put(problem.tokens())
    state = trainer.initial_state()

    def call():
        nonlocal state
        state, measures = trainer.step(state, tokens)
        return jax.block_until_ready(measures.loss)

    def result():
        return {"y": np.asarray(call()), **to_torch(trainer.model(state.params), "torch.nn")}

    return Call(call, result)


@contenders.torch("torch")
def torch_steps(problem: CharLM, dtype: str = "float32") -> Call:
    """The torch twin, which uses torch.nn.LSTM, trained with torch.optim.AdamW."""
    import torch

    from torch_ref import RNNLanguageModel

    model = RNNLanguageModel.from_config(problem.config).to(getattr(torch, dtype))
    model.load_state_dict({name: torch.tensor(w) for name, w in problem.arrays().items()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=OptimizerConfig().learning_rate)
    tokens = torch.tensor(problem.tokens(), dtype=torch.long)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def call() -> float:
        optimizer.zero_grad()
        logits, _ = model(inputs)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    def result():
        loss = np.asarray(call())
        weights = {name: w.detach().cpu().numpy() for name, w in model.named_parameters()}
        return {"y": loss, **{name: w.copy() for name, w in weights.items()}}

    return Call(call, result)


class NNXModel(nnx.Module):
    """The same model, written with `nnx.RNN`."""

    def __init__(self, problem: CharLM, rngs: nnx.Rngs):
        hidden, vocab = problem.hidden, problem.vocab
        self.embedding = nnx.Embed(vocab, hidden, rngs=rngs)
        self.cells = nnx.List(
            nnx.OptimizedLSTMCell(hidden, hidden, rngs=rngs) for _ in range(problem.num_layers)
        )
        self.norm = nnx.LayerNorm(hidden, epsilon=1e-5, rngs=rngs)
        self.head = nnx.Linear(hidden, vocab, rngs=rngs)

    def __call__(self, tokens):
        """The logits."""
        x: Any = self.embedding(tokens)
        zeros = jnp.zeros((len(x), x.shape[-1]))
        for cell in self.cells:
            x = nnx.RNN(cell, rngs=False)(x, initial_carry=(zeros, zeros))
        return self.head(self.norm(x))


@contenders.jax("nnx + optax")
def nnx_and_optax(problem: CharLM) -> Call:
    """`nnx.RNN`, `nnx.Optimizer` and `nnx.jit`, as in Flax's guides.

    It has one bias in the place of torch's two, which together move twice as far in a step.
    """
    # Copy the twin's weights into the model, with torch's two biases added.
    model = NNXModel(problem, nnx.Rngs(0))
    arrays = problem.arrays()
    table: dict[str, Any] = {
        "embedding.weight": model.embedding.embedding,
        "layer_norm.weight": model.norm.scale,
        "layer_norm.bias": model.norm.bias,
        "proj.weight": model.head.kernel,
        "proj.bias": model.head.bias,
    }
    for layer, cell in enumerate(model.cells):
        table[f"rnn.weight_ih_l{layer}"] = cell.dense_i.kernel
        table[f"rnn.weight_hh_l{layer}"] = cell.dense_h.kernel
        bias = arrays[f"rnn.bias_ih_l{layer}"] + arrays[f"rnn.bias_hh_l{layer}"]
        cell.dense_h.bias = nnx.Param(jnp.asarray(bias))
    transposed = {name for name in table if name.startswith(("proj.weight", "rnn.weight"))}
    for name, param in table.items():
        w = arrays[name]
        param.set_value(jnp.asarray(w.T if name in transposed else w))
    # Compile the whole step, as Flax's guides recommend.
    optimizer = nnx.Optimizer(
        model, optax.adamw(OptimizerConfig().learning_rate, weight_decay=0.01), wrt=nnx.Param
    )
    tokens = jnp.asarray(problem.tokens())

    @nnx.jit
    def step(model, optimizer, tokens):
        def loss_fn(model):
            logits = model(tokens[:, :-1])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return losses.mean()

        loss, gradients = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, gradients)
        return loss

    def call():
        return jax.block_until_ready(step(model, optimizer, tokens))

    def result():
        loss = np.asarray(call())
        weights = {name: np.asarray(param[...]) for name, param in table.items()}
        return {"y": loss, **{n: w.T if n in transposed else w for n, w in weights.items()}}

    return Call(call, result)
