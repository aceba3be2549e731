"""Neural matrix factorization in PyTorch: the twin of `examples.models.neumf`."""

import itertools

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from examples.models import neumf


class NeuMF(nn.Module):
    """A user and an item to the logit of whether they go together."""

    def __init__(self, model: neumf.NeuMF, users: np.ndarray, items: np.ndarray):
        del users, items
        super().__init__()
        width = model.layers[0] // 2
        self.user_factors = nn.Embedding(model.users, model.factors)
        self.item_factors = nn.Embedding(model.items, model.factors)
        self.user_embedding = nn.Embedding(model.users, width)
        self.item_embedding = nn.Embedding(model.items, width)
        self.layers = nn.ModuleList(nn.Linear(*widths) for widths in itertools.pairwise(model.layers))
        self.head = nn.Linear(model.factors + model.layers[-1], 1)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Returns logits, shape `(batch,)`, of users and items, shape `(batch,)`, int64."""
        product = self.user_factors(users) * self.item_factors(items)
        x = torch.cat([self.user_embedding(users), self.item_embedding(items)], dim=-1)
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.head(torch.cat([product, x], dim=-1))[:, 0]


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean binary cross entropy of labels 0 or 1, float32, shape `(batch,)`."""
    return F.binary_cross_entropy_with_logits(logits, labels)
