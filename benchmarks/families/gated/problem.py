"""One layer of a gated recurrence: its weights, its float64 oracle, what it should cost."""

import dataclasses
import math
from typing import Any, Literal

import numpy as np

from benchmarks.problem import FORWARD, Problem, Work

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


@dataclasses.dataclass(frozen=True)
class Gated(Problem):
    """One layer, as wide as its input, without a state before it."""

    cell: Literal["LSTM", "GRU", "RNN"]
    time: int
    batch: int
    hidden: int

    @property
    def name(self) -> str:
        """The cell and the sizes."""
        return f"{self.cell} T{self.time} B{self.batch} H{self.hidden}"

    def arrays(self):
        """X, and the weights under torch's keys.

        A GRU has no b_hn: flax's optimised cell has none.
        """
        rng, bound = np.random.default_rng(0), 1 / math.sqrt(self.hidden)
        gates = GATES[self.cell] * self.hidden

        def uniform(*shape: int) -> np.ndarray:
            return rng.uniform(-bound, bound, shape).astype(np.float32)

        arrays = {
            "x": rng.standard_normal((self.batch, self.time, self.hidden), np.float32),
            "weight_ih_l0": uniform(gates, self.hidden),
            "weight_hh_l0": uniform(gates, self.hidden),
            "bias_ih_l0": uniform(gates),
            "bias_hh_l0": uniform(gates),
        }
        if self.cell == "GRU":
            arrays["bias_hh_l0"][-self.hidden :] = 0
        return arrays

    def cotangent(self):
        """Of y."""
        shape = (self.batch, self.time, self.hidden)
        return np.random.default_rng(1).standard_normal(shape, np.float32)

    def oracle(self):
        """torch.nn in float64."""
        import torch

        arrays = {name: x.astype(np.float64) for name, x in self.arrays().items()}
        x = torch.from_numpy(arrays.pop("x")).requires_grad_()
        module = torch_module(self).double()
        module.load_state_dict({name: torch.from_numpy(w) for name, w in arrays.items()})
        y, _ = module(x)
        y.backward(torch.from_numpy(self.cotangent()).double())
        leaves = {"x": x, **dict(module.named_parameters())}
        gradients = {name: leaf.grad.numpy() for name, leaf in leaves.items()}
        return {"y": y.detach().numpy(), **gradients}

    def work(self, part):
        """The products with both matrices; as many again for the gradients of each factor."""
        products = 2 * self.time * self.batch * 2 * self.hidden * GATES[self.cell] * self.hidden
        return Work(flops=products if part == FORWARD else 3 * products)

    def targets(self, part, platform):
        """What the time over theirs should be, forward and with the backward pass."""
        if platform != "cpu":
            return {"torch": 1.05}
        column = 0 if part == FORWARD else 1
        if self.cell != "LSTM":
            pairs = {"torch": (1.05, 1.0), "JAX peer": (0.85, 0.75)}
        elif self.batch == 1:
            pairs = {"torch": (1.4, 1.2), "JAX peer": (0.75, 0.5)}
        elif self.hidden < 512:
            pairs = {"torch": (1.15, 1.25), "JAX peer": (0.85, 0.85), "limit": (0.55, 0.55)}
        else:
            pairs = {"torch": (1.05, 1.15), "JAX peer": (0.9, 0.8), "limit": (0.75, 0.6)}
        return {against: pair[column] for against, pair in pairs.items()}


def torch_module(problem: Gated) -> Any:
    """Torch's layer of these sizes."""
    import torch

    return getattr(torch.nn, problem.cell)(problem.hidden, problem.hidden, batch_first=True)


def problems(quick: bool) -> list[Gated]:
    """What the time over theirs should be."""
    sizes: list[tuple] = [
        ("LSTM", 128, 32, 256),
        ("LSTM", 512, 16, 512),
        ("LSTM", 1024, 1, 256),
        ("LSTM", 64, 64, 1024),
        ("GRU", 256, 32, 256),
        ("RNN", 256, 32, 256),
    ]
    return [Gated(*size) for size in (sizes[:1] if quick else sizes)]
