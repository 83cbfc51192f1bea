"""silero-VAD over whole recordings."""

import dataclasses
from importlib.metadata import distribution
from typing import Any

import numpy as np

from benchmarks.problem import FORWARD, OURS, Contenders, Function, Problem

SAMPLE_RATE, FRAME = 16000, 512


@dataclasses.dataclass(frozen=True)
class Recordings(Problem):
    """Recordings of noise with changing loudness, for the published weights."""

    batch: int
    seconds: int
    parts = (FORWARD,)

    @property
    def name(self) -> str:
        """The number of recordings and their length."""
        return f"{self.batch} × {self.seconds} s at 16 kHz"

    def arrays(self):
        """The audio, cut to whole frames."""
        samples = self.seconds * SAMPLE_RATE // FRAME * FRAME
        noise = np.random.default_rng(0).standard_normal((self.batch, samples), np.float32)
        loudness = 0.1 * np.sin(3 * np.arange(samples) / SAMPLE_RATE) ** 2
        return {"audio": noise * loudness.astype(np.float32)}

    def oracle(self):
        """Computes the twin in float64."""
        import torch

        import torch_ref
        from jax_models import to_torch

        twin = torch_ref.SileroVAD(SAMPLE_RATE).double().requires_grad_(False)
        weights = to_torch(_model(), "silero").items()
        twin.load_state_dict({key: torch.from_numpy(array) for key, array in weights})
        return {"y": twin(torch.from_numpy(self.arrays()["audio"]).double())[0].numpy()}


def problems(quick: bool) -> list[Recordings]:
    """One recording of a minute, and eight of ten seconds."""
    sizes = [(1, 60), (8, 10)]
    return [Recordings(*size) for size in (sizes[:1] if quick else sizes)]


contenders = Contenders()


@contenders.jax(OURS)
def ours(problem: Recordings):
    """Our model, on all frames at once except in the LSTM."""
    model = _model()
    return Function(problem.arrays(), lambda arrays: model(arrays["audio"])[0])


@contenders.torch("silero-vad's TorchScript")
def torchscript(problem: Recordings):
    """The published TorchScript, frame by frame in one thread, as the package runs it."""
    import torch

    script = _script()

    def run(arrays):
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            script.reset_states()
            frames = arrays["audio"].split(FRAME, dim=1)
            return torch.cat([script(frame, SAMPLE_RATE) for frame in frames], dim=1)
        finally:
            torch.set_num_threads(threads)

    return Function({"audio": torch.as_tensor(problem.arrays()["audio"])}, run)


def _script() -> Any:
    import torch

    path = distribution("silero-vad").locate_file("silero_vad/data/silero_vad.jit")
    return torch.jit.load(str(path)).eval()


def _model():
    from flax import nnx

    from jax_models import SileroVAD, from_torch

    return from_torch(SileroVAD(rngs=nnx.Rngs(0)), _script()._model.state_dict())
