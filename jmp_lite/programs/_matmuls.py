"""Finds matmuls, convolutions and attentions, and the dtypes in which they multiply and sum."""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

from ._hlo import HloArray, Instruction

_HALF = {"f16", "bf16"}
_EIGHT_BIT = {"s8", "u8"}
_NARROW_FLOATS = ("f8", "f4")  # The beginnings of f8e4m3fn, f8e5m2, f4e2m1fn, ...
_NVIDIA = {"gpu", "cuda"}
# `__cudnn$blockScaledDot`, the matmul of `jax.nn.scaled_dot_general` on a GPU that has one.
_BLOCK_SCALED = "blockscaleddot"


@dataclasses.dataclass(frozen=True)
class Matmul:
    """A matmul, convolution or attention.

    Attributes:
        kind: `gemm`, `convolution` or `attention`.
        target: the library function that runs it, such as `__cublas$lt$matmul`, or XLA's `dot`.
        operands: two or three arrays.
        result: the array of the result.
        arithmetic: the dtype of the multiplication: `f16`, `bf16`, `tf32` (float32 rounded to a mantissa of
            10 bits), `f32`, `f8e4m3fn`, `bf16_x3` (float32 as three matmuls of bfloat16 parts), ...
        accumulation: the dtype of the sums.
        on_tensor_cores: whether an NVIDIA GPU runs it on Tensor Cores.
        flops: floating point operations of one run; 0 if they are not known. An attention counts two matmuls
            forward and four backward, without a mask.
        times: how many times it runs.
        operation: the scopes and the JAX operation that it comes from.

    Examples:
        >>> program = read_program(jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8))).compile())
        >>> matmul = program.matmuls[0]
        >>> matmul.kind, matmul.arithmetic, matmul.flops, matmul.on_tensor_cores
        ('gemm', 'f32', 1024, False)
    """

    kind: str
    target: str
    operands: tuple[HloArray, ...]
    result: HloArray
    arithmetic: str
    accumulation: str
    on_tensor_cores: bool
    flops: int
    times: int
    operation: str


def matmuls_of(instruction: Instruction, times: int, device: Any) -> Iterator[Matmul]:
    """Yields the matmuls of an instruction: itself, or those inside its kernel."""
    if instruction.operation == "fusion":
        for computation in instruction.called("calls"):
            for inner in computation:
                yield from matmuls_of(inner, times, device)
    kind = _kind(instruction)
    operands = tuple(operand.arrays[0] for operand in instruction.operands if operand.arrays)
    # Further operands are a bias, a sum to add to, or scales: cuBLAS and cuDNN fuse them into the matmul.
    operands = operands[: 3 if kind == "attention" else 2]
    results = instruction.results
    if kind is None or not operands or not results:
        return
    arithmetic, accumulation = _precision(instruction, operands, device)
    narrow = arithmetic.startswith((*_HALF, *_EIGHT_BIT, *_NARROW_FLOATS, "tf32"))
    yield Matmul(
        kind=kind,
        target=instruction.target or instruction.operation,
        operands=operands,
        result=results[0],
        arithmetic=arithmetic,
        accumulation=accumulation,
        on_tensor_cores=device.platform in _NVIDIA and narrow,
        flops=_flops(kind, instruction, operands, results[0]),
        times=times,
        operation=operation_of(instruction),
    )


def _kind(instruction: Instruction) -> str | None:
    # For a GPU, XLA rewrites matmuls to calls of `__cublas$gemm`, `__cublas$lt$matmul$f8`,
    # `__cudnn$convForward`, `__cudnn$fmhaSoftmax` and others
    # (https://github.com/openxla/xla/blob/06db3c8349ca/xla/service/gpu/cublas_cudnn.cc); for a CPU to
    # `__onednn$matmul` and others.
    if instruction.operation in ("dot", "ragged-dot", "scaled-dot"):
        return "gemm"
    if instruction.operation == "convolution":
        return "convolution"
    target = instruction.target.lower()
    if target.startswith("__cudnn$fmha"):
        return "attention"
    if "conv" in target and target.startswith(("__cudnn", "__onednn")):
        return "convolution"
    return "gemm" if any(name in target for name in ("matmul", "gemm", _BLOCK_SCALED)) else None


def _precision(instruction: Instruction, operands: tuple[HloArray, ...], device: Any) -> tuple[str, str]:
    """Returns the dtype of the multiplication and the dtype of the sums."""

    def bits(array):
        return HloArray(array.dtype, (8,)).size  # 8 elements have as many bytes as one has bits.

    widest = max(operands, key=bits).dtype
    if widest in _EIGHT_BIT:
        return widest, "s32"
    if widest in _HALF or widest.startswith(_NARROW_FLOATS):
        return widest, "f32"  # XLA asks cuBLAS and cuDNN for float32 sums of narrower matmuls.
    # The A100 and all later GPUs have TF32. A GPU that is not known may have it.
    capability = re.match(r"\d+", getattr(device, "compute_capability", ""))
    is_old = capability is not None and int(capability[0]) < 8
    if widest != "f32" or device.platform not in _NVIDIA or is_old:
        return widest, widest
    return _precision_of_float32(instruction)


def _precision_of_float32(instruction: Instruction) -> tuple[str, str]:
    # The precision is in the settings of a call of cuBLAS, and in the attributes of a `dot`.
    settings = instruction.backend_config.items()
    gemm = next((setting for name, setting in settings if name.endswith("gemm_backend_config")), {})
    config = gemm.get("precision_config", {})
    algorithm = config.get("algorithm", "ALG_UNSET").lower()
    if algorithm == "alg_unset":
        algorithm = instruction.attribute(r"\balgorithm=(\w+)")
    # For example dot_bf16_bf16_f32_x3: three matmuls of bfloat16 parts, added in float32.
    if stated := re.fullmatch(r"(?:alg_)?dot_([a-z0-9]+)_[a-z0-9]+_(\w?f\d+)(_x\d)?", algorithm):
        return stated[1] + (stated[3] or ""), stated[2]
    asked = config.get("operand_precision")
    asked = asked or instruction.attribute(r"\boperand_precision=\{([\w,]+)").upper().split(",")
    # JAX's default precision allows TF32: https://github.com/jax-ml/jax/issues/12008.
    return ("f32" if "HIGHEST" in asked else "tf32"), "f32"


def _flops(kind: str, instruction: Instruction, operands: tuple[HloArray, ...], result: HloArray) -> int:
    if kind == "gemm":
        axes = _summed_axes(instruction)
        if axes is None:
            return 0
        # A complex matmul is four matmuls and four sums.
        multiply_add = 8 if result.dtype.startswith("c") else 2
        return multiply_add * math.prod(result.shape) * math.prod(operands[0].shape[axis] for axis in axes)
    if kind == "attention":
        config = instruction.backend_config.get("cudnn_fmha_backend_config", {})
        scores = config.get("intermediate_tensor_shape", {}).get("dimensions", [0])
        # Two matmuls forward, four backward, each with its axes in the settings.
        matmuls = sum(name.endswith("dot_dimension_numbers") for name in config)
        return 2 * matmuls * math.prod(map(int, scores)) * operands[0].shape[-1]
    # Such as `b01f_01io->b01f`; the middle names the axes of the kernel, of which `o` is that of the outputs.
    labels = re.match(r"\w+_(\w+)->", instruction.attribute(r"dim_labels=([^,\s]+)"))
    if labels and len(operands) == 2:
        # The calls of cuDNN for the two gradients of a convolution name the axes of the forward pass. They
        # take the gradient of its output in place of the input or of the kernel.
        output, kernel = result, operands[1]
        if "BackwardInput" in instruction.target:
            output = operands[0]
        elif "BackwardFilter" in instruction.target:
            output, kernel = operands[1], result
        # Without a call of cuDNN, the gradient of a strided convolution pads its input with zeros between the
        # elements, which do not count.
        spread = math.prod(map(int, filter(None, instruction.attribute(r"lhs_dilate=([\dx]+)").split("x"))))
        outputs = kernel.shape[labels[1].index("o")]
        return 2 * math.prod(output.shape) * math.prod(kernel.shape) // (outputs * spread)
    return 0


def _summed_axes(instruction: Instruction) -> list[int] | None:
    """Returns the contracted axes of the first operand of a matmul; None if they are not known."""
    # XLA moves the axes of a matmul into the settings of the call when it rewrites it for cuBLAS.
    config = instruction.backend_config.get("gemm_backend_config", {})
    axes = config.get("dot_dimension_numbers", {}).get("lhs_contracting_dimensions")
    if _BLOCK_SCALED in instruction.target.lower():
        return [-1]  # The call has no settings. XLA brings both operands to the form (batch, row, sum).
    if axes is None and instruction.target:
        return None  # A call of another library, such as oneDNN.
    if axes is None:
        axes = filter(None, instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}").split(","))
    return [int(axis) for axis in axes]


def operation_of(instruction: Instruction) -> str:
    """Returns scopes and operation, without the outer jit: `transpose(jvp(Model))/Dense_0/dot_general`."""
    return re.sub(r"^jit\([^()]*\)/", "", instruction.op_name)
