"""BERT in PyTorch: the twin of `examples.models.bert`."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from examples.models import bert


class Block(nn.Module):
    """A post-norm transformer block."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.project = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the shape of `x`, `(batch, length, width)`."""
        y = self.project(x).unflatten(-1, (3, self.heads, -1))
        y = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in y.unbind(2)))
        x = self.attention_norm(x + self.merge(y.transpose(1, 2).flatten(2)))
        y = F.gelu(self.expand(x), approximate="tanh")
        return self.norm(x + self.contract(y))


class BERT(nn.Module):
    """Tokens to the logits of the masked tokens."""

    def __init__(self, model: bert.BERT, tokens: np.ndarray, masked: np.ndarray):
        del tokens, masked
        super().__init__()
        self.tokens = nn.Embedding(model.vocabulary, model.width)
        self.positions = nn.Embedding(model.length, model.width)
        self.embedding_norm = nn.LayerNorm(model.width)
        self.blocks = nn.ModuleList(Block(model.width, model.heads) for _ in range(model.layers))
        self.transform = nn.Linear(model.width, model.width)
        self.norm = nn.LayerNorm(model.width)

    def forward(self, tokens: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
        """Returns the logits of the masked tokens.

        Args:
            tokens: shape `(batch, length)`, int64.
            masked: the indices of the masked tokens, shape `(batch, masked)`, int64.

        Returns:
            Shape `(batch, masked, vocabulary)`.
        """
        x = self.embedding_norm(self.tokens(tokens) + self.positions.weight[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        x = x.take_along_dim(masked[..., None], dim=1)
        x = F.gelu(self.transform(x), approximate="tanh")
        return F.linear(self.norm(x), self.tokens.weight)


def loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of the masked tokens, shape `(batch, masked)`."""
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
