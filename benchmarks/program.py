"""Reads the optimized program that XLA compiled: which library calls it makes, how many bytes it moves.

It reads the text of the entry computation, so a loop's body is not counted. Bytes are those that the kernels
and library calls read and write, a fused kernel counting its operands and results once.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4}
_BYTES |= {"s64": 8, "u64": 8, "f64": 8, "c64": 8}
# What gives a name to a buffer, or a part of one, and moves nothing.
_NO_KERNEL = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of the entry computation.

    Attributes:
        name: its name in the program.
        opcode: `fusion`, `custom-call`, `copy`, ...
        arrays: dtype and shape of what it gives, workspace of libraries left out.
        operands: the names of what it takes.
        target: the library function that a custom call calls, otherwise empty.
    """

    name: str
    opcode: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    operands: tuple[str, ...]
    target: str

    @property
    def size(self) -> int:
        """The bytes of what it gives."""
        return sum(_BYTES.get(dtype, 4) * math.prod(shape) for dtype, shape in self.arrays)


def entry(text: str) -> Iterator[Instruction]:
    """Yields the instructions of the entry computation of an HLO module's text."""
    for line in text[text.index("\nENTRY ") :].splitlines()[2:]:
        if line.startswith("}"):
            return
        found = re.match(r"\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$", line)
        if found is None:
            continue
        name, shapes, opcode, rest = found.groups()
        arrays = [
            (dtype, tuple(map(int, filter(None, sizes.split(",")))))
            for dtype, sizes in re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", shapes)
        ]
        target = re.search(r'custom_call_target="([^"]+)"', rest)
        if target:  # A library's workspace is bytes.
            arrays = [array for array in arrays if array[0] != "s8"]
        operands = tuple(re.findall(r"%([\w.\-]+)", _until_closed(rest)))
        yield Instruction(name, opcode, tuple(arrays), operands, target.group(1) if target else "")


def _until_closed(rest: str) -> str:
    """Returns what comes before the parenthesis that closes the operands."""
    depth = 1
    for place, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return rest[:place]
    return rest


def library_calls(text: str) -> list[tuple[str, tuple[str, ...], str]]:
    """Returns the target, operand dtypes and result dtype of each library call, in the order of the program.

    A matrix product is `__cublas$lt$matmul`, a convolution `__cudnn$conv...`, an attention `__cudnn$fmha...`.
    """
    instructions = list(entry(text))
    arrays = {each.name: each.arrays for each in instructions}
    return [
        (each.target, tuple(arrays[name][0][0] for name in each.operands[:2]), each.arrays[0][0])
        for each in instructions
        if each.target.startswith(("__cublas", "__cudnn"))
    ]


def bytes_moved(text: str) -> int:
    """Returns how many bytes the kernels and library calls of a program read and write."""
    instructions = list(entry(text))
    sizes = {each.name: each.size for each in instructions}
    return sum(
        each.size + sum(sizes.get(name, 0) for name in each.operands)
        for each in instructions
        if each.opcode not in _NO_KERNEL
    )
