"""One layer of a gated recurrence: its weights, its float64 oracle and its target times."""

import dataclasses
import math
from typing import Any, Literal

import numpy as np

from benchmarks.problem import FORWARD, Problem, Work

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


@dataclasses.dataclass(frozen=True)
class Gated(Problem):
    """One layer that is as wide as its input and starts from the zero state."""

    cell: Literal["LSTM", "GRU", "RNN"]
    time: int
    batch: int
    hidden: int
    bidirectional: bool = False
    padded: bool = False
    """Whether rows have lengths between T/4 and T. y is zero after the end of a row."""

    @property
    def name(self) -> str:
        """The cell, the sizes and the options."""
        options = " bidirectional" * self.bidirectional + " with lengths" * self.padded
        return f"{self.cell} T{self.time} B{self.batch} H{self.hidden}{options}"

    @property
    def directions(self) -> list[str]:
        """The suffixes of torch's keys for each direction."""
        return ["_l0", "_l0_reverse"] if self.bidirectional else ["_l0"]

    @property
    def lengths(self) -> np.ndarray | None:
        """The lengths of the rows; None if they are not padded."""
        if not self.padded:
            return None
        rng = np.random.default_rng(2)
        return rng.integers(self.time // 4, self.time, self.batch, np.int32, endpoint=True)

    def arrays(self):
        """The input x, and the weights under torch's keys.

        The GRU's bias b_hn is zero, because Flax's NNX cell has none.
        """
        rng, bound = np.random.default_rng(0), 1 / math.sqrt(self.hidden)
        gates = GATES[self.cell] * self.hidden

        def uniform(*shape: int) -> np.ndarray:
            return rng.uniform(-bound, bound, shape).astype(np.float32)

        arrays = {"x": rng.standard_normal((self.batch, self.time, self.hidden), np.float32)}
        for end in self.directions:
            arrays[f"weight_ih{end}"] = uniform(gates, self.hidden)
            arrays[f"weight_hh{end}"] = uniform(gates, self.hidden)
            arrays[f"bias_ih{end}"] = uniform(gates)
            arrays[f"bias_hh{end}"] = uniform(gates)
            if self.cell == "GRU":
                arrays[f"bias_hh{end}"][-self.hidden :] = 0
        return arrays

    def cotangent(self):
        """A random gradient of y."""
        shape = (self.batch, self.time, len(self.directions) * self.hidden)
        return np.random.default_rng(1).standard_normal(shape, np.float32)

    def oracle(self):
        """Computes torch.nn's layer in float64."""
        import torch

        arrays = {name: x.astype(np.float64) for name, x in self.arrays().items()}
        x = torch.from_numpy(arrays.pop("x")).requires_grad_()
        module = torch_module(self).double()
        module.load_state_dict({name: torch.from_numpy(w) for name, w in arrays.items()})
        y = torch_outputs(self, module, x)
        y.backward(torch.from_numpy(self.cotangent()).double())
        leaves = {"x": x, **dict(module.named_parameters())}
        gradients = {name: leaf.grad.numpy() for name, leaf in leaves.items()}
        return {"y": y.detach().numpy(), **gradients}

    def work(self, part):
        """The products with both matrices, and as many again for the gradient of each factor."""
        steps = self.batch * self.time if self.lengths is None else int(self.lengths.sum())
        per_step = 2 * 2 * self.hidden * GATES[self.cell] * self.hidden
        products = len(self.directions) * steps * per_step
        return Work(flops=products if part == FORWARD else 3 * products)

    def targets(self, part, platform):
        """The largest allowed ratios of our time to the peers'. Pairs are (forward, both)."""
        if platform != "cpu":
            return {"torch": 1.05}
        column = 0 if part == FORWARD else 1
        if self.cell != "LSTM":
            pairs = {"torch": (1.05, 1.0), "JAX peer": (0.85, 0.75)}
        elif self.bidirectional or self.padded:
            pairs = {"torch": (1.5, 1.5)}
        elif self.batch == 1:
            pairs = {"torch": (1.4, 1.5), "JAX peer": (0.75, 0.5)}
        elif self.hidden < 512:
            backward = 1.35 if self.hidden >= 384 else 1.5
            pairs = {"torch": (1.15, backward), "JAX peer": (0.85, 0.85), "limit": (0.55, 0.55)}
        else:
            pairs = {"torch": (1.05, 1.35), "JAX peer": (0.9, 0.8), "limit": (0.75, 0.6)}
        pairs["nnx.RNN"] = (1.0, 1.0)
        return {against: pair[column] for against, pair in pairs.items()}

    def targets_with_kernels(self, part, platform):
        """The kernels are not slower than torch's."""
        return {**self.targets(part, platform), "torch": 1.0}


def torch_module(problem: Gated) -> Any:
    """The layer of torch with these sizes and options."""
    import torch

    return getattr(torch.nn, problem.cell)(
        problem.hidden, problem.hidden, batch_first=True, bidirectional=problem.bidirectional
    )


def torch_outputs(problem: Gated, module: Any, x: Any) -> Any:
    """Runs torch's layer. Rows with lengths are packed."""
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

    if problem.lengths is None:
        return module(x)[0]
    lengths = problem.lengths.tolist()
    packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return pad_packed_sequence(module(packed)[0], batch_first=True, total_length=problem.time)[0]


def problems(quick: bool) -> list[Gated]:
    """Small and large layers, single rows and batches, and the LSTM with its options."""
    found = [
        Gated("LSTM", 128, 32, 256),
        Gated("LSTM", 512, 16, 512),
        Gated("LSTM", 1024, 1, 256),
        Gated("LSTM", 64, 64, 1024),
        Gated("LSTM", 100, 24, 384),
        Gated("LSTM", 150, 16, 200, bidirectional=True),
        Gated("LSTM", 128, 32, 256, padded=True),
        Gated("GRU", 256, 32, 256),
        Gated("RNN", 256, 32, 256),
    ]
    return found[:1] if quick else found
