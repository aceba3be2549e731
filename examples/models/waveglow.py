"""WaveGlow (Prenger et al., 2018): a normalizing flow from speech to noise, given its spectrogram."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from . import data
from .workload import Batch, Optimizer, Workload

SIGMA = 1.0  # Of the noise; section 3.2 has 0.5 to 1.


class WaveNet(nn.Module):
    """Half of the channels and the spectrogram to a scale and a shift of the other half (section 2.1).

    Attributes:
        channels: the channels of the output.
        features: the features of the layers.
        layers: the number of dilated convolutions.
    """

    channels: int
    features: int
    layers: int

    @nn.compact
    def __call__(self, x: jax.Array, spectrogram: jax.Array) -> jax.Array:
        x = nn.Dense(self.features, name="start")(x)
        told = nn.Dense(2 * self.features * self.layers, name="condition")(spectrogram)
        told = jnp.split(told, self.layers, axis=-1)
        output = jnp.zeros_like(x)
        for layer in range(self.layers):
            conv = nn.Conv(
                2 * self.features, (3,), padding=2**layer, kernel_dilation=2**layer, name=f"conv_{layer}"
            )
            value, gate = jnp.split(conv(x) + told[layer], 2, axis=-1)
            y = nn.tanh(value) * nn.sigmoid(gate)
            if layer < self.layers - 1:
                x = x + nn.Dense(self.features, name=f"residual_{layer}")(y)
            output = output + nn.Dense(self.features, name=f"skip_{layer}")(y)
        return nn.Dense(self.channels, kernel_init=nn.initializers.zeros, name="end")(output)


class WaveGlow(nn.Module):
    """Audio to noise, and the change of volume of that map.

    Attributes:
        flows: the number of steps.
        group: the number of samples that form the channels of one position.
        early: after this many steps, two channels leave the flow.
        features, layers: the size of each `WaveNet`.
        hop: the number of samples for each frame of the spectrogram.
    """

    flows: int = 12
    group: int = 8
    early: int = 4
    features: int = 512
    layers: int = 8
    hop: int = 256

    @nn.compact
    def __call__(self, audio: jax.Array, spectrogram: jax.Array) -> Any:
        """Runs the flow from audio to noise.

        Args:
            audio: shape `(batch, samples)`, a multiple of `hop`.
            spectrogram: shape `(batch, samples / hop, bands)`.

        Returns:
            The noise, shape `(batch, samples / group, group)`; the logarithms of the scales of each step; and
            the logarithm of the determinant of each step's mixing matrix, float32.
        """
        batch, samples = audio.shape
        bands = spectrogram.shape[-1]
        widen = nn.ConvTranspose(bands, (4 * self.hop,), (self.hop,), padding="VALID", name="widen")
        spectrogram = widen(spectrogram)[:, :samples].reshape(batch, -1, self.group * bands)
        x = audio.reshape(batch, -1, self.group)
        done, log_scales, log_determinants = [], [], []
        for flow in range(self.flows):
            if flow and flow % self.early == 0:
                done.append(x[..., :2])
                x = x[..., 2:]
            channels = x.shape[-1]
            mix = nn.Dense(
                channels, use_bias=False, kernel_init=nn.initializers.orthogonal(), name=f"mix_{flow}"
            )
            x = mix(x)
            # The determinant takes the parameter itself, which no policy has rounded.
            log_determinants.append(jnp.linalg.slogdet(mix.variables["params"]["kernel"])[1])
            kept, changed = jnp.split(x, 2, axis=-1)
            wavenet = WaveNet(channels, self.features, self.layers, name=f"wavenet_{flow}")
            log_scale, shift = jnp.split(wavenet(kept, spectrogram), 2, axis=-1)
            x = jnp.concatenate([kept, changed * jnp.exp(log_scale) + shift], axis=-1)
            log_scales.append(log_scale)
        return jnp.concatenate([*done, x], axis=-1), log_scales, log_determinants


def loss(outputs: Any, targets: Any) -> jax.Array:
    """The negative log-likelihood of a sample, up to a constant (equation 11)."""
    del targets
    noise, log_scales, log_determinants = outputs
    energy = jnp.square(noise).sum() / (2 * SIGMA**2)
    grown = sum(log_scale.sum() for log_scale in log_scales)
    grown += noise.shape[0] * noise.shape[1] * sum(log_determinants)
    return (energy - grown) / noise.size


def full() -> Workload:
    """The paper's network on 16,000 samples or so of noise and 80 bands."""
    model = WaveGlow()

    def batch(rng: np.random.Generator, size: int) -> Batch:
        audio = 0.1 * rng.standard_normal((size, 62 * 256), np.float32)
        return (audio, rng.standard_normal((size, 62, 80), np.float32)), ()

    return Workload(model, loss, Optimizer("adam", 1e-4), 4, batch)


def small() -> Workload:
    """Four steps on the lines of photographs, which are signals like any other, and their spectra."""
    model = WaveGlow(flows=4, early=2, features=24, layers=3, hop=8)

    def batch(rng: np.random.Generator, size: int) -> Batch:
        photographs = data.pictures()
        chosen = [photographs[index] for index in rng.integers(0, len(photographs), size)]
        lines = [image[rng.integers(0, len(image)), :264] for image in chosen]
        audio = np.stack([line - line.mean() for line in lines]) + 0.01 * rng.standard_normal(
            (size, 264), np.float32
        )
        windows = np.lib.stride_tricks.sliding_window_view(audio, 16, axis=1)[:, :256:8] * np.hanning(16)
        spectrogram = np.log(1e-3 + np.abs(np.fft.rfft(windows))).astype(np.float32)
        return (audio[:, :256], spectrogram), ()

    return Workload(model, loss, Optimizer("adam", 2e-3), 16, batch)
