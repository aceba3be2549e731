"""ResNet in PyTorch: the twin of `examples.models.resnet`."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from examples.models import resnet


def conv(channels: int, features: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    """A convolution without a bias, padded as evenly as its kernel is odd."""
    return nn.Conv2d(channels, features, kernel, stride, kernel // 2, bias=False)


class Basic(nn.Module):
    """Two 3 x 3 convolutions around a skip connection (ResNet-18 and -34)."""

    widening = 1

    def __init__(self, channels: int, features: int, stride: int):
        super().__init__()
        self.conv_1, self.norm_1 = conv(channels, features, 3, stride), nn.BatchNorm2d(features)
        self.conv_2, self.norm_2 = conv(features, features, 3), nn.BatchNorm2d(features)
        self.skip = self.skip_norm = None
        if stride != 1 or channels != features:
            self.skip, self.skip_norm = conv(channels, features, 1, stride), nn.BatchNorm2d(features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns shape `(batch, features, height / stride, width / stride)`."""
        y = F.relu(self.norm_1(self.conv_1(x)))
        y = self.norm_2(self.conv_2(y))
        if self.skip is not None and self.skip_norm is not None:
            x = self.skip_norm(self.skip(x))
        return F.relu(x + y)


class Bottleneck(nn.Module):
    """A 3 x 3 convolution between two 1 x 1, around a skip connection (ResNet-50 and deeper)."""

    widening = 4

    def __init__(self, channels: int, features: int, stride: int):
        super().__init__()
        wide = self.widening * features
        self.conv_1, self.norm_1 = conv(channels, features, 1), nn.BatchNorm2d(features)
        self.conv_2, self.norm_2 = conv(features, features, 3, stride), nn.BatchNorm2d(features)
        self.conv_3, self.norm_3 = conv(features, wide, 1), nn.BatchNorm2d(wide)
        self.skip = self.skip_norm = None
        if stride != 1 or channels != wide:
            self.skip, self.skip_norm = conv(channels, wide, 1, stride), nn.BatchNorm2d(wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns shape `(batch, 4 features, height / stride, width / stride)`."""
        y = F.relu(self.norm_1(self.conv_1(x)))
        y = F.relu(self.norm_2(self.conv_2(y)))
        y = self.norm_3(self.conv_3(y))
        if self.skip is not None and self.skip_norm is not None:
            x = self.skip_norm(self.skip(x))
        return F.relu(x + y)


BLOCKS = {resnet.Basic: Basic, resnet.Bottleneck: Bottleneck}


class ResNet(nn.Module):
    """Images to the logits of their classes."""

    def __init__(self, model: resnet.ResNet, images: np.ndarray):
        super().__init__()
        block = BLOCKS[model.block]  # type: ignore[index]
        self.large = model.stem == 7
        self.stem = conv(images.shape[-1], model.features, model.stem, 1 + self.large)
        self.stem_norm = nn.BatchNorm2d(model.features)
        self.stages, channels = nn.ModuleList(), model.features
        for stage, blocks in enumerate(model.stages):
            features, stage_blocks = model.features * 2**stage, nn.ModuleList()
            for index in range(blocks):
                stage_blocks.append(block(channels, features, 2 if stage and not index else 1))
                channels = features * block.widening
            self.stages.append(stage_blocks)
        self.head = nn.Linear(channels, model.classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns logits, shape `(batch, classes)`, of images, shape `(batch, channels, height, width)`."""
        x = F.relu(self.stem_norm(self.stem(images)))
        if self.large:
            x = F.max_pool2d(x, 3, 2, 1)
        for blocks in self.stages:
            for block in blocks:  # type: ignore[attr-defined]
                x = block(x)
        return self.head(x.mean((2, 3)))


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of the labels, shape `(batch,)`."""
    return F.cross_entropy(logits, labels)
