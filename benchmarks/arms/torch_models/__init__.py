"""The models of `examples.models` in PyTorch, as its users write them, with the parameters of the Flax ones.

Where PyTorch has something faster, it is used: fused attention, cuDNN's LSTM, images with channels last.
Everything else, parameter names included, is as in the file of the same name in `examples.models`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen
import numpy as np
import torch
from torch import nn

from examples import models
from examples.models.workload import Optimizer, Workload

from . import bert, gpt2, neumf, resnet, seq2seq, ssd, unet, waveglow
from .load import load

Loss = Callable[[Any, Any], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Twin:
    """The PyTorch version of a Flax model.

    Attributes:
        module: takes the Flax module, for its fields, and the inputs, for their shapes. The inputs are those
            that initialize the Flax module.
        loss: takes the outputs of the module and the targets, and returns a float32 scalar.
    """

    module: Callable[..., nn.Module]
    loss: Loss


TWINS: dict[type[flax.linen.Module], Twin] = {
    models.bert.BERT: Twin(bert.BERT, bert.loss),
    models.gpt2.GPT2: Twin(gpt2.GPT2, gpt2.loss),
    models.neumf.NeuMF: Twin(neumf.NeuMF, neumf.loss),
    models.resnet.ResNet: Twin(resnet.ResNet, resnet.loss),
    models.seq2seq.Seq2Seq: Twin(seq2seq.Seq2Seq, seq2seq.loss),
    models.ssd.SSD: Twin(ssd.SSD, ssd.loss),
    models.unet.UNet: Twin(unet.UNet, unet.loss),
    models.waveglow.WaveGlow: Twin(waveglow.WaveGlow, waveglow.loss),
}


def twin(workload: Workload, variables: Mapping[str, Any]) -> tuple[nn.Module, Loss]:
    """Returns the PyTorch module with the parameters of the Flax one, in training mode, and its loss.

    Args:
        workload: the model and its training.
        variables: the result of `workload.init`.
    """
    found = TWINS[type(workload.model)]
    inputs, _ = workload.batch(0, 1)
    module = found.module(workload.model, *inputs)
    load(module, variables)
    return module.train(), found.loss


def tensors(batch: Any, device: str) -> Any:
    """Returns a batch, or a part of one, on a device.

    Integers become int64, which PyTorch needs for indices. Arrays with four axes are images. Their view is
    `(batch, channels, height, width)`, and their memory keeps channels last, as in Flax.
    """
    if isinstance(batch, tuple):
        return tuple(tensors(part, device) for part in batch)
    array = np.asarray(batch)
    found = torch.from_numpy(array.astype(np.int64) if array.dtype.kind == "i" else array).to(device)
    return found.permute(0, 3, 1, 2) if found.ndim == 4 else found


def make_optimizer(settings: Optimizer, module: nn.Module) -> torch.optim.Optimizer:
    """Returns the fused optimizer of the trainable parameters."""
    parameters = [each for each in module.parameters() if each.requires_grad]
    adam: dict[str, Any] = {"betas": settings.betas, "eps": settings.epsilon, "fused": True}
    match settings.kind:
        case "sgd":
            return torch.optim.SGD(parameters, settings.learning_rate, settings.momentum, fused=True)
        case "adam":
            return torch.optim.Adam(parameters, settings.learning_rate, **adam)
        case "adamw":
            decay = settings.weight_decay
            return torch.optim.AdamW(parameters, settings.learning_rate, weight_decay=decay, **adam)
