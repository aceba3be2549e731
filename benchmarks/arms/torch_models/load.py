"""Flax parameters into a PyTorch module whose layers have the same names.

A layer of the module is a scope of the Flax model if their paths agree once every `.` and `/` is a `_`:
Flax's `blocks_0/norm` is `blocks[0].norm` or `blocks_0.norm`, whichever is more natural.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from flax.traverse_util import flatten_dict
from torch import nn

Source = tuple[str, Callable[[np.ndarray], np.ndarray]]


def _same(x: np.ndarray) -> np.ndarray:
    return x


def _kernel(kernel: np.ndarray) -> np.ndarray:
    """`(space, in, out)` to `(out, in, space)`, of as many axes of space as there are: none for a Dense."""
    return np.moveaxis(kernel, (-1, -2), (0, 1))


def _transposed_kernel(kernel: np.ndarray) -> np.ndarray:
    """`(space, in, out)` to `(in, out, space)`, flipped: PyTorch's kernel is that of the gradient."""
    return np.moveaxis(np.flip(kernel, tuple(range(kernel.ndim - 2))), (-2, -1), (0, 1))


def _lstm(layer: nn.LSTM) -> dict[str, Source]:
    """The names of an LSTM. One that reads both ways is two Flax layers, `forward` and `backward`.

    A Flax layer has one bias and cuDNN has two: `bias_hh` must be zero and untrained.
    """
    ways = {"": "forward_", "_reverse": "backward_"} if layer.bidirectional else {"": ""}
    sources: dict[str, Source] = {}
    for suffix, way in ways.items():
        sources["weight_ih_l0" + suffix] = (way + "inputs_kernel", _kernel)
        sources["bias_ih_l0" + suffix] = (way + "inputs_bias", _same)
        sources["weight_hh_l0" + suffix] = (way + "cell_hidden_kernel", _kernel)
    return sources


def _sources(layer: nn.Module) -> dict[str, Source]:
    """Returns, for each name in a layer, the Flax name and how the one array becomes the other."""
    match layer:
        case nn.Linear() | nn.Conv1d() | nn.Conv2d():
            return {"weight": ("kernel", _kernel), "bias": ("bias", _same)}
        case nn.ConvTranspose1d() | nn.ConvTranspose2d():
            return {"weight": ("kernel", _transposed_kernel), "bias": ("bias", _same)}
        case nn.Embedding():
            return {"weight": ("embedding", _same)}
        case nn.LayerNorm():
            return {"weight": ("scale", _same), "bias": ("bias", _same)}
        case nn.BatchNorm2d():
            statistics = {"running_mean": ("mean", _same), "running_var": ("var", _same)}
            return {"weight": ("scale", _same), "bias": ("bias", _same), **statistics}
        case nn.LSTM():
            return _lstm(layer)
    return {}


def converted(module: nn.Module, variables: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns Flax variables as the tensors of a module, by the names of the module.

    Args:
        module: a model of `benchmarks.arms.torch_models`.
        variables: `params`, or their gradients, and other collections such as `batch_stats`.

    Raises:
        ValueError: the module has no parameter for an array, or an array is missing or has another shape.
    """
    arrays: dict[str, Any] = {}
    for collection in variables.values():
        arrays |= flatten_dict(collection, sep="_")
    found: dict[str, torch.Tensor] = {}
    for path, layer in module.named_modules():
        scope = path.rpartition(".")[0] if isinstance(layer, nn.LSTM) and layer.bidirectional else path
        scope = scope.replace(".", "_") + "_" if scope else ""
        for name, (flax_name, conversion) in _sources(layer).items():
            target = getattr(layer, name)
            if target is None:  # No bias.
                continue
            full_name = f"{path}.{name}"
            if scope + flax_name not in arrays:
                raise ValueError(f"{full_name} needs {scope + flax_name}, which Flax's variables do not have")
            array = np.ascontiguousarray(conversion(np.asarray(arrays.pop(scope + flax_name))))
            if array.shape != target.shape:
                raise ValueError(f"{full_name} has shape {tuple(target.shape)}, Flax's array {array.shape}")
            found[full_name] = torch.from_numpy(array.copy())
    unknown = {name for name, parameter in module.named_parameters() if parameter.requires_grad} - set(found)
    if arrays or unknown:
        raise ValueError(
            f"no parameter for Flax's {sorted(arrays)}, no array for the module's {sorted(unknown)}"
        )
    return found


def load(module: nn.Module, variables: Mapping[str, Any]) -> None:
    """Copies Flax variables into a module; arguments and errors as for `converted`."""
    module.load_state_dict(converted(module, variables), strict=False)  # Flax has no counters of steps.
