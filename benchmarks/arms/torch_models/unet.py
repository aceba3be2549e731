"""U-Net in PyTorch: the twin of `examples.models.unet`."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from examples.models import unet


class TwoConvs(nn.Module):
    """Two 3 x 3 convolutions. Each one removes a pixel from every edge."""

    def __init__(self, channels: int, features: int):
        super().__init__()
        self.conv_1 = nn.Conv2d(channels, features, 3)
        self.conv_2 = nn.Conv2d(features, features, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns shape `(batch, features, height - 4, width - 4)`."""
        return F.relu(self.conv_2(F.relu(self.conv_1(x))))


def crop(x: torch.Tensor, size: int) -> torch.Tensor:
    """Returns the middle, `size` by `size`, of images."""
    edge = (x.shape[-1] - size) // 2
    return x[:, :, edge : edge + size, edge : edge + size]


class UNet(nn.Module):
    """Images to the logits of the classes of their inner pixels."""

    def __init__(self, model: unet.UNet, images: np.ndarray):
        super().__init__()
        self.down, self.widen, self.up = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        channels = images.shape[-1]
        for level in range(model.depth):
            features = model.features * 2**level
            self.down.append(TwoConvs(channels, features))
            self.widen.append(nn.ConvTranspose2d(2 * features, features, 2, 2))
            self.up.append(TwoConvs(2 * features, features))
            channels = features
        self.bottom = TwoConvs(channels, 2 * channels)
        self.head = nn.Conv2d(model.features, model.classes, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns logits, shape `(batch, classes, inner height, inner width)`.

        Args:
            images: square, shape `(batch, channels, height, width)`.
        """
        x, skips = images, []
        for down in self.down:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.bottom(x)
        for widen, up, skip in zip(reversed(self.widen), reversed(self.up), reversed(skips)):
            x = widen(x)
            x = up(torch.cat([crop(skip, x.shape[-1]), x], dim=1))
        return self.head(x)


def loss(logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of the classes of pixels, shape `(batch, inner height, inner width)`."""
    return F.cross_entropy(logits, classes)
