"""SSD in PyTorch: the twin of `examples.models.ssd`."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from examples.models import ssd

from .resnet import Basic, conv

Found = tuple[torch.Tensor, torch.Tensor]


class Extra(nn.Module):
    """A smaller map of features, of the one before."""

    def __init__(self, channels: int, features: int, kernel: int, stride: int, padding: int):
        super().__init__()
        self.narrow = nn.Conv2d(channels, features // 2, 1)
        self.conv = nn.Conv2d(features // 2, features, kernel, stride, padding)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns shape `(batch, features, smaller height, smaller width)`."""
        return F.relu(self.conv(F.relu(self.narrow(x))))


class SSD(nn.Module):
    """Images to what lies in each default box."""

    def __init__(self, model: ssd.SSD, images: np.ndarray):
        super().__init__()
        self.classes = model.classes
        self.stem = conv(images.shape[-1], model.features, 7, 2)
        self.stem_norm = nn.BatchNorm2d(model.features)
        self.stages, channels = nn.ModuleList(), model.features
        for stage, blocks in enumerate(model.stages):
            features, stage_blocks = model.features * 2**stage, nn.ModuleList()
            for index in range(blocks):
                stage_blocks.append(Basic(channels, features, 2 if stage == 1 and not index else 1))
                channels = features
            self.stages.append(stage_blocks)
        self.extras, widths = nn.ModuleList(), [channels]
        for features, *shape in model.extras:
            self.extras.append(Extra(widths[-1], features, *shape))
            widths.append(features)
        self.offsets, self.logits = nn.ModuleList(), nn.ModuleList()
        for width, ratios in zip(widths, model.ratios):
            boxes = 2 + 2 * ratios
            self.offsets.append(nn.Conv2d(width, 4 * boxes, 3, padding=1))
            self.logits.append(nn.Conv2d(width, model.classes * boxes, 3, padding=1))

    def forward(self, images: torch.Tensor) -> Found:
        """Looks for objects.

        Args:
            images: shape `(batch, channels, image, image)`.

        Returns:
            The offsets of the boxes, shape `(batch, boxes, 4)`, and the logits of their classes, shape
            `(batch, boxes, classes)`.
        """
        x = F.relu(self.stem_norm(self.stem(images)))
        x = F.max_pool2d(x, 3, 2, 1)
        for blocks in self.stages:
            for block in blocks:  # type: ignore[attr-defined]
                x = block(x)
        maps = [x]
        for extra in self.extras:
            maps.append(extra(maps[-1]))
        # With channels last this moves nothing.
        boxes = lambda x, width: x.permute(0, 2, 3, 1).reshape(len(x), -1, width)
        offsets = [boxes(layer(x), 4) for layer, x in zip(self.offsets, maps)]
        logits = [boxes(layer(x), self.classes) for layer, x in zip(self.logits, maps)]
        return torch.cat(offsets, dim=1), torch.cat(logits, dim=1)


def loss(outputs: Found, targets: Found) -> torch.Tensor:
    """How far off the boxes of objects are, and the cross entropy of these and of the hardest others.

    Args:
        outputs: offsets and logits of `SSD`.
        targets: offsets and classes of `examples.models.ssd.match`, batched.
    """
    (offsets, logits), (true_offsets, classes) = outputs, targets
    positive = classes > 0
    count = positive.sum(1)
    entropies = F.cross_entropy(logits.flatten(0, 1), classes.flatten(), reduction="none").view_as(classes)
    background = entropies.detach().masked_fill(positive, 0)
    hardest_first = background.sort(dim=1, descending=True).values
    limit = hardest_first.gather(1, (3 * count).clamp(max=classes.shape[1] - 1)[:, None])
    chosen = positive | (background > limit)
    distances = F.huber_loss(offsets.float(), true_offsets, reduction="none").sum(-1)
    total = (distances * positive).sum(1) + (entropies * chosen).sum(1)
    return (total / count.clamp(min=1)).mean()
