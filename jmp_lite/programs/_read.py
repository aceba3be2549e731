"""Reads a compiled program from the text that XLA prints: `read_program`."""

import re
from collections.abc import Iterator
from typing import Any

import jax

from ._hlo import Computation, Instruction, parse
from ._matmuls import matmuls_of, operation_of
from ._program import Collective, Launch, Program
from ._traffic import bytes_of

# Instructions that name a buffer or a part of one, or only wait. XLA starts no kernel for them.
_NO_KERNEL = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier"}
_NO_KERNEL |= {"add-dependency", "partition-id", "replica-id", "domain"}
# Instructions that run other computations, whose kernels are counted.
_NO_KERNEL |= {"while", "conditional", "call", "async"}
_BODIES = ("body", "condition", "true_computation", "false_computation", "branch_computations")
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_COLLECTIVES += ("collective-broadcast", "ragged-all-to-all")
_NAMES_A_BUFFER = ("bitcast", "get-tuple-element", "tuple")
_CALLS_BACK = re.compile(r"callback|infeed|outfeed|SendToHost|RecvFromHost", re.IGNORECASE)


def read_program(compiled: Any) -> Program:
    """Returns the matmuls, kernels, bytes and memory of a compiled step.

    Args:
        compiled: the result of `jax.jit(step).lower(*args).compile()`, or of `nnx.jit`, for any device.
            `compile_for` compiles for a GPU that the machine does not have.

    Returns:
        The matmuls with their dtypes, kernels, bytes, memory, conditionals and collectives of one run on one
        device. `print` it for a table.

    Raises:
        TypeError: `compiled` is not a compiled program.

    Examples:
        >>> x = jnp.ones((8, 8), jnp.bfloat16)
        >>> program = read_program(jax.jit(lambda x: x @ x).lower(x).compile())
        >>> [(matmul.kind, matmul.flops) for matmul in program.matmuls]
        [('gemm', 1024)]
    """
    compiled = getattr(compiled, "compiled", compiled)  # `nnx.jit` wraps what `jax.jit` has compiled.
    if not isinstance(compiled, jax.stages.Compiled):
        raise TypeError(
            f"read_program takes what the compile() of a jitted step returns. Got {type(compiled).__name__}. "
            "Write read_program(step.lower(*args).compile()), where step is a function of jax.jit or nnx.jit."
        )
    return _read(compiled.as_text() or "", compiled.memory_analysis(), _device(compiled))


def _read(text: str, memory: Any, device: Any) -> Program:
    # Some backends have no analysis of the memory. JAX then returns None.
    def size(name):
        return getattr(memory, f"{name}_size_in_bytes", 0)

    matmuls, collectives, launches, syncs = [], [], [], []
    conditionals = 0
    for instruction, times in _executed(parse(text), 1):
        own = list(matmuls_of(instruction, times, device))
        matmuls += own
        conditionals += instruction.opcode == "conditional"
        syncs += _syncs(instruction)
        if instruction.operation in _COLLECTIVES:
            arrays = tuple(array for operand in instruction.operands for array in operand.arrays)
            collectives.append(Collective(instruction.operation, arrays, times, operation_of(instruction)))
        elif _runs(instruction):
            launches.append(_launch(instruction, sum(matmul.flops for matmul in own), times))
    return Program(
        device=device.device_kind,
        matmuls=tuple(matmuls),
        collectives=tuple(collectives),
        launches=tuple(launches),
        kernels=sum(launch.times for launch in launches),
        bytes_moved=sum(launch.times * launch.bytes_moved for launch in launches),
        temporary_bytes=size("temp"),
        argument_bytes=size("argument"),
        output_bytes=size("output"),
        aliased_bytes=size("alias"),
        conditionals=conditionals,
        host_syncs=tuple(syncs),
    )


def _launch(instruction: Instruction, flops: int, times: int) -> Launch:
    """Returns a kernel, with its bytes by the dtypes of the arrays that it reads and writes."""
    operands, results = instruction.operands, instruction.results
    inner = [operand for operand in operands if not _is_argument(operand)]
    arrays = [array for operand in inner for array in operand.arrays]
    if not _is_output(instruction):
        arrays += results
    # A kernel may read only a part of an operand, so its bytes are split in proportion to its arrays.
    total = sum(operand.size for operand in operands) + sum(array.size for array in results)
    moved = bytes_of(instruction)

    def share(dtypes: set[str]) -> int:
        size = sum(array.size for array in arrays if array.dtype in dtypes)
        return round(moved * size / total) if total else 0

    name, operation = instruction.name, operation_of(instruction)
    return Launch(name, operation, flops, moved, share({"f32"}), share({"f16", "bf16"}), times)


def _is_argument(instruction: Instruction) -> bool:
    while instruction.opcode in _NAMES_A_BUFFER and instruction.operands:
        instruction = instruction.operands[0]
    return instruction.computation.is_entry and instruction.opcode == "parameter"


def _is_output(instruction: Instruction) -> bool:
    if not instruction.computation.is_entry:
        return False
    # The root of the entry is usually a tuple of the outputs.
    readers = [user for user in instruction.users if user.opcode in _NAMES_A_BUFFER]
    return instruction.is_root or any(map(_is_output, readers))


def _device(compiled: Any) -> Any:
    # The shardings are the only public way to the devices. A program without arrays has none.
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return min(shardings[0].device_set, key=lambda device: device.id) if shardings else jax.devices()[0]


def _executed(computation: Computation, times: int) -> Iterator[tuple[Instruction, int]]:
    """Yields each instruction outside of kernels, with how many times it runs."""
    for instruction in computation:
        yield instruction, times
        called = instruction.called(*_BODIES)
        # The `to_apply` of a reduction and the `calls` of a fusion are code inside their kernel.
        if instruction.operation in ("call", "async"):
            called += instruction.called("to_apply", "calls")
        for inner in called:
            yield from _executed(inner, times * (_trips(instruction) or 1))


def _trips(instruction: Instruction) -> int | None:
    """Returns the length of a loop, None if only the device knows it; 1 for other instructions."""
    if instruction.opcode != "while":
        return 1
    # XLA knows the length of a loop whose counter has a known start, step and end, such as a `lax.scan`, and
    # stores it in the `while`:
    # https://github.com/openxla/xla/blob/16569562fc04/xla/service/while_loop_trip_count_annotator.h.
    known = instruction.backend_config.get("known_trip_count")
    return int(known["n"]) if known else None


def _runs(instruction: Instruction) -> bool:
    """Whether an instruction starts a kernel or a library call."""
    # An asynchronous instruction counts once, by its `-start`.
    if instruction.operation in _NO_KERNEL or instruction.opcode.endswith(("-done", "-update")):
        return False
    # An array without elements needs no kernel. A call without results runs for its side effect.
    return not instruction.results or any(array.size for array in instruction.results)


def _syncs(instruction: Instruction) -> list[str]:
    # The host reads the predicate to know which kernels it should start.
    if instruction.opcode == "conditional":
        return ["conditional"]
    if instruction.opcode == "while" and _trips(instruction) is None:
        return ["while, of a length that the device decides"]
    name = instruction.target or instruction.opcode
    return [name] if _CALLS_BACK.search(name) else []
