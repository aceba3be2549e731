"""Which instructions are matrix products, convolutions and attentions, and in what they multiply and add."""

import dataclasses
import math
import re
from collections.abc import Iterator

from ._hlo import Array, Computation, Instruction, Module

_HALF = {"f16", "bf16"}
_EIGHT_BIT = {"s8", "u8"}
_NVIDIA = {"gpu", "cuda"}


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product, convolution or attention.

    Attributes:
        kind: `gemm`, `convolution` or `attention`.
        target: the library function that runs it, such as `__cublas$lt$matmul`; `dot` or `convolution` where
            XLA makes the kernel.
        operands: what it takes, two arrays or three.
        result: what it gives.
        arithmetic: in what it multiplies: `f16`, `bf16`, `tf32` (float32, of which 10 bits of the mantissa
            go in), `f32`, `f8e4m3fn`, ...
        accumulation: in what it adds up.
        on_tensor_cores: whether an NVIDIA GPU runs it on Tensor Cores.
        flops: of one run; 0 if they cannot be told.
        times: how often it runs.
        operation: the scopes and the operation of JAX that it was made of.
    """

    kind: str
    target: str
    operands: tuple[Array, ...]
    result: Array
    arithmetic: str
    accumulation: str
    on_tensor_cores: bool
    flops: int
    times: int
    operation: str


def products_of(
    instruction: Instruction, computation: Computation, module: Module, times: int, platform: str
) -> Iterator[Product]:
    """Yields the products that an instruction runs: it is one, or a kernel that has one inside."""
    if instruction.opcode == "fusion":
        for name in instruction.called("calls"):
            inside = module.computations[name]
            for each in inside:
                yield from products_of(each, inside, module, times, platform)
    kind = _kind(instruction)
    if kind is None:
        return
    operands = tuple(operand.arrays[0] for operand in computation.operands(instruction))
    operands = operands[: 3 if kind == "attention" else 2]
    widest = max(operands, key=lambda array: Array(array.dtype, (8,)).size).dtype
    arithmetic = "tf32" if widest == "f32" and platform in _NVIDIA and _may_round(instruction) else widest
    half = arithmetic in _HALF or arithmetic.startswith("f8")
    yield Product(
        kind=kind,
        target=instruction.target or instruction.opcode,
        operands=operands,
        result=instruction.arrays[0],
        arithmetic=arithmetic,
        # cuBLAS and cuDNN are always asked for float32 sums of what is narrower.
        accumulation="f32" if half or arithmetic == "tf32" else "s32" if widest in _EIGHT_BIT else widest,
        on_tensor_cores=platform in _NVIDIA and (half or arithmetic == "tf32" or widest in _EIGHT_BIT),
        flops=_flops(kind, instruction, operands),
        times=times,
        operation=operation_of(instruction),
    )


def _kind(instruction: Instruction) -> str | None:
    if instruction.opcode in ("dot", "ragged-dot", "scaled-dot"):
        return "gemm"
    if instruction.opcode == "convolution":
        return "convolution"
    target = instruction.target.lower()
    if target.startswith("__cudnn$fmha"):
        return "attention"
    if "conv" in target and target.startswith(("__cudnn", "__onednn")):
        return "convolution"
    return "gemm" if "matmul" in target or "gemm" in target else None


def _may_round(instruction: Instruction) -> bool:
    """Whether a float32 product may round its operands to TF32, as JAX's default precision lets it."""
    config = next(
        (c for name, c in instruction.backend_config.items() if name.endswith("gemm_backend_config")), {}
    )
    precision = config.get("precision_config", {})
    if (algorithm := precision.get("algorithm", "ALG_UNSET")) != "ALG_UNSET":
        return "TF32" in algorithm
    stated = precision.get("operand_precision") or instruction.attribute(r"operand_precision=\{(\w+)").split()
    return "HIGHEST" not in [each.upper() for each in stated]


def _flops(kind: str, instruction: Instruction, operands: tuple[Array, ...]) -> int:
    result = instruction.arrays[0]
    if kind == "gemm" and operands:
        config = instruction.backend_config.get("gemm_backend_config", {})
        axes = config.get("dot_dimension_numbers", {}).get("lhs_contracting_dimensions")
        if axes is None:
            axes = filter(None, instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}").split(","))
        summed = math.prod(operands[0].shape[int(axis)] for axis in axes)
        return 2 * math.prod(result.shape) * summed
    labels = re.match(r"\w+_(\w+)->", instruction.attribute(r"dim_labels=([^,\s]+)"))
    if kind == "convolution" and labels and len(operands) == 2:
        output, kernel = result, operands[1]
        if "BackwardInput" in instruction.target:
            output = operands[0]
        elif "BackwardFilter" in instruction.target:
            output, kernel = operands[1], result
        return 2 * math.prod(output.shape) * math.prod(kernel.shape) // kernel.shape[labels[1].index("o")]
    return 0


def operation_of(instruction: Instruction) -> str:
    """The scopes and the operation, without the outer jit: `transpose(jvp(Model))/Dense_0/dot_general`."""
    return re.sub(r"^jit\([^()]*\)/", "", instruction.op_name)
