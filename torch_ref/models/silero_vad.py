"""silero-VAD 6 in plain PyTorch (snakers4/silero-vad)."""

__all__ = ["SileroVAD"]

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_ref.layers.state import State


class SileroVAD(nn.Module):
    """Computes the probability of speech in each frame (32 ms) of a recording.

    audio is (batch, samples) in whole frames, and the probabilities are (batch, frames). The state
    is (context, h, c): the last samples, (batch, context), and the state of the LSTM, each (batch,
    128). The keys are those of `silero_vad_16k.safetensors`.
    """

    def __init__(self, sample_rate: int = 16000):
        super().__init__()
        window = {16000: 256, 8000: 128}[sample_rate]
        self.frame_length, self.context_length = 2 * window, window // 4
        self.bins = window // 2 + 1
        self.stft_conv = nn.Conv1d(1, 2 * self.bins, window, stride=window // 2, bias=False)
        self.stft_conv.requires_grad_(False)
        self.conv1 = nn.Conv1d(self.bins, 128, 3, padding=1)
        self.conv2 = nn.Conv1d(128, 64, 3, stride=2, padding=1)
        self.conv3 = nn.Conv1d(64, 64, 3, stride=2, padding=1)
        self.conv4 = nn.Conv1d(64, 128, 3, padding=1)
        self.lstm_cell = nn.LSTMCell(128, 128)
        self.final_conv = nn.Conv1d(128, 1, 1)

    def forward(self, audio: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        context, h, c = self.init_state(len(audio)) if state is None else state
        probabilities = []
        for frame in audio.split(self.frame_length, dim=1):
            # The STFT of a frame also reads the last samples of the frame before it.
            x = torch.cat([context, frame], dim=1)
            context = frame[:, -self.context_length :]

            # Compute the magnitudes of the STFT, and convolve them down to one column.
            x = F.pad(x, (0, self.context_length), mode="reflect")
            real, imaginary = self.stft_conv(x[:, None]).split(self.bins, dim=1)
            x = torch.sqrt(real**2 + imaginary**2)  # 4 columns
            for conv in (self.conv1, self.conv2, self.conv3, self.conv4):
                x = torch.relu(conv(x))  # 4, 2, 1 and 1 columns

            # The LSTM remembers the frames so far, and the head computes a probability from its
            # output.
            h, c = self.lstm_cell(x[:, :, 0], (h, c))
            logit = self.final_conv(torch.relu(h)[:, :, None])
            probabilities.append(torch.sigmoid(logit[:, 0, 0]))
        return torch.stack(probabilities, dim=1), (context, h, c)

    def init_state(self, batch_size: int) -> State:
        sizes = self.context_length, 128, 128
        return tuple(self.conv1.weight.new_zeros(batch_size, size) for size in sizes)
