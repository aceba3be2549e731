"""GPT-2 in PyTorch: the twin of `examples.models.gpt2`."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from examples.models import gpt2


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the shape of `x`, `(batch, length, width)`."""
        y = self.project(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = (part.transpose(1, 2) for part in y.unbind(2))
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.merge(y.transpose(1, 2).flatten(2))
        return x + self.contract(F.gelu(self.expand(self.norm(x)), approximate="tanh"))


class GPT2(nn.Module):
    """Tokens to the logits of the next token, by the embedding again."""

    def __init__(self, model: gpt2.GPT2, tokens: np.ndarray):
        del tokens
        super().__init__()
        self.tokens = nn.Embedding(model.vocabulary, model.width)
        self.positions = nn.Embedding(model.length, model.width)
        self.blocks = nn.ModuleList(Block(model.width, model.heads) for _ in range(model.layers))
        self.norm = nn.LayerNorm(model.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns logits, shape `(batch, length, vocabulary)`, of tokens, shape `(batch, length)`, int64."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of the next tokens, shape `(batch, length)`."""
    return F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
