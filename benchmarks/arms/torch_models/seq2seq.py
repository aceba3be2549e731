"""An LSTM encoder and decoder with attention, in PyTorch: the twin of `examples.models.seq2seq`."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from examples.models import seq2seq


class LSTM(nn.LSTM):
    """cuDNN's LSTM, which has two biases: the second is zero, and not trained.

    Autocast casts for cuDNN to float16, even where bfloat16 is asked for (ATen/cudnn/AutocastRNN.cpp), and
    on a CPU not at all. Where it would be wrong, the casts are written out.
    """

    def __init__(self, features: int, hidden: int, bidirectional: bool = False):
        super().__init__(features, hidden, batch_first=True, bidirectional=bidirectional)
        for name, parameter in self.named_parameters():
            if name.startswith("bias_hh"):
                nn.init.zeros_(parameter).requires_grad_(False)

    @torch.compiler.disable  # A compiler would write the loop out.
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Returns the hidden states, shape `(batch, length, hidden)`, or twice as wide both ways.

        Args:
            x: shape `(batch, length, features)`.
        """
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
        if dtype == torch.float32 or (device, dtype) == ("cuda", torch.float16):
            return super().forward(x)[0]
        with torch.autocast(device, enabled=False):
            weights = [weight.to(dtype) for weight in self._flat_weights if weight is not None]
            start = x.new_zeros(1 + self.bidirectional, len(x), self.hidden_size, dtype=dtype)
            return torch.lstm(
                x.to(dtype), (start, start), weights, True, 1, 0.0, self.training, self.bidirectional, True
            )[0]


class Seq2Seq(nn.Module):
    """A source and the target so far to the logits of the next target token."""

    def __init__(self, model: seq2seq.Seq2Seq, source: np.ndarray, target: np.ndarray):
        del source, target
        super().__init__()
        width = model.features
        self.tokens = nn.Embedding(model.vocabulary, width)
        self.both_ways = LSTM(width, width, bidirectional=True)
        self.encoder = nn.ModuleList(
            LSTM(width if layer else 2 * width, width) for layer in range(model.layers - 1)
        )
        self.decoder = nn.ModuleList(
            LSTM(2 * width if layer else width, width) for layer in range(model.layers)
        )
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, model.vocabulary)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Returns the logits of the next token after each target token.

        Args:
            source: shape `(batch, source length)`, int64.
            target: shape `(batch, target length)`, int64.

        Returns:
            Shape `(batch, target length, vocabulary)`.
        """
        x = self.encoder[0](self.both_ways(self.tokens(source)))
        for layer in self.encoder[1:]:  # type: ignore[attr-defined]
            x = x + layer(x)
        y = self.decoder[0](self.tokens(target))
        operands = (self.query(y), self.key(x), self.value(x))
        context = F.scaled_dot_product_attention(*(x[:, None] for x in operands))[:, 0]
        for layer in self.decoder[1:]:  # type: ignore[attr-defined]
            y = y + layer(torch.cat([y, context], dim=-1))
        return self.head(y)


def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of the next tokens, shape `(batch, length)`, those that are no padding."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=seq2seq.PADDING)
