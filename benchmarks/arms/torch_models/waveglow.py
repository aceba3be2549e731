"""WaveGlow in PyTorch: the twin of `examples.models.waveglow`.

Channels are last throughout. Then a convolution of one sample is a product of matrices with its bias fused,
and nothing is transposed between it and the dilated ones.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from examples.models import waveglow


class Conv(nn.Conv1d):
    """A convolution of `(batch, length, channels)`, by way of images one pixel high.

    `F.conv1d` makes what it is given contiguous, which moves the channels to the front and back again.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Returns shape `(batch, length, features)`."""
        y = F.conv2d(
            x.mT.unsqueeze(2),
            self.weight.unsqueeze(2),
            self.bias,
            padding=(0, *self.padding),  # type: ignore[arg-type]
            dilation=(1, *self.dilation),
        )
        return y.squeeze(2).mT


class WaveNet(nn.Module):
    """From half of the channels and the spectrogram to the change of the other half."""

    def __init__(self, channels: int, bands: int, features: int, layers: int):
        super().__init__()
        self.start = nn.Linear(channels // 2, features)
        self.condition = nn.Linear(bands, 2 * features * layers)
        self.conv = nn.ModuleList(
            Conv(features, 2 * features, 3, padding=2**layer, dilation=2**layer) for layer in range(layers)
        )
        self.residual = nn.ModuleList(nn.Linear(features, features) for _ in range(layers - 1))
        self.skip = nn.ModuleList(nn.Linear(features, features) for _ in range(layers))
        self.end = nn.Linear(features, channels)

    def forward(self, x: torch.Tensor, spectrogram: torch.Tensor) -> torch.Tensor:
        """Returns shape `(batch, length, channels)`."""
        x, output = self.start(x), None
        told = self.condition(spectrogram).chunk(len(self.conv), dim=-1)
        for layer, conv in enumerate(self.conv):
            value, gate = (conv(x) + told[layer]).chunk(2, dim=-1)
            y = value.tanh() * gate.sigmoid()
            if layer < len(self.residual):
                x = x + self.residual[layer](y)
            skip = self.skip[layer](y)
            output = skip if output is None else output + skip
        return self.end(output)


class WaveGlow(nn.Module):
    """Audio to noise, and by how much space grew on the way."""

    def __init__(self, model: waveglow.WaveGlow, audio: np.ndarray, spectrogram: np.ndarray):
        del audio
        super().__init__()
        self.group, self.early, bands = model.group, model.early, spectrogram.shape[-1]
        self.widen = nn.ConvTranspose1d(bands, bands, 4 * model.hop, model.hop)
        self.mix, self.wavenet = nn.ModuleList(), nn.ModuleList()
        for flow in range(model.flows):
            channels = model.group - 2 * (flow // model.early)
            self.mix.append(nn.Linear(channels, channels, bias=False))
            self.wavenet.append(WaveNet(channels, model.group * bands, model.features, model.layers))

    def forward(self, audio: torch.Tensor, spectrogram: torch.Tensor) -> Any:
        """Runs the flow from the audio's end.

        Args:
            audio: shape `(batch, samples)`.
            spectrogram: shape `(batch, samples / hop, bands)`.

        Returns:
            The noise, shape `(batch, samples / group, group)`; the logarithms of the scales of each step; and
            the logarithm of the determinant of each step's mixing matrix, float32.
        """
        batch, samples = audio.shape
        spectrogram = self.widen(spectrogram.mT)[..., :samples].mT
        spectrogram = spectrogram.reshape(batch, samples // self.group, -1)
        x = audio.view(batch, -1, self.group)
        done, log_scales, log_determinants = [], [], []
        for flow, (mix, wavenet) in enumerate(zip(self.mix, self.wavenet)):
            if flow and flow % self.early == 0:
                done.append(x[..., :2])
                x = x[..., 2:]
            x = mix(x)
            log_determinants.append(torch.linalg.slogdet(mix.weight).logabsdet)
            kept, changed = x.chunk(2, dim=-1)
            log_scale, shift = wavenet(kept, spectrogram).chunk(2, dim=-1)
            x = torch.cat([kept, changed * log_scale.exp() + shift], dim=-1)
            log_scales.append(log_scale)
        return torch.cat([*done, x], dim=-1), log_scales, log_determinants


def loss(outputs: Any, targets: Any) -> torch.Tensor:
    """The negative log-likelihood of a sample, up to a constant; the sums are in float32."""
    del targets
    noise, log_scales, log_determinants = outputs
    energy = noise.float().square().sum() / (2 * waveglow.SIGMA**2)
    grown = sum(log_scale.float().sum() for log_scale in log_scales)
    grown += noise.shape[0] * noise.shape[1] * sum(log_determinants)
    return (energy - grown) / noise.numel()
