"""Parses the text of an optimized XLA program, the one public form in which JAX gives it out.

It parses what a report needs: the computations and their instructions. An instruction has an opcode, the
arrays of its result, the names of its operands and its attributes.
"""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any

_BITS = re.compile(r"(\d+)")


@dataclasses.dataclass(frozen=True)
class Array:
    """An array as XLA names it.

    Attributes:
        dtype: `f32`, `bf16`, `pred`, `f8e4m3fn`, ...
        shape: its sizes.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of bytes; 0 for a token, which only orders instructions."""
        if self.dtype == "token":
            return 0
        bits = _BITS.search(self.dtype)
        return -(-math.prod(self.shape) * (int(bits[1]) if bits else 8) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        name: its name in the computation.
        opcode: `fusion`, `custom-call`, `copy`, ...
        arrays: the arrays of the result; those of a tuple one after the other.
        operands: the names of the instructions whose results it takes.
        attributes: the text after the operands, without the metadata.
        op_name: the scopes and the name of the JAX operation from which XLA made it.
        is_root: whether the computation returns its result.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    op_name: str
    is_root: bool

    @property
    def size(self) -> int:
        """The number of bytes of the result."""
        return sum(array.size for array in self.arrays)

    @property
    def target(self) -> str:
        """The library function that a custom call calls; empty for other instructions."""
        return self.attribute(r'custom_call_target="([^"]+)"')

    @property
    def operation(self) -> str:
        """The opcode, without the `-start` of an asynchronous instruction."""
        return self.opcode.removesuffix("-start")

    @cached_property
    def backend_config(self) -> dict[str, Any]:
        """The settings of the backend for it; empty if they are no JSON, as for a foreign function."""
        _, found, config = self.attributes.partition("backend_config=")
        try:
            return json.JSONDecoder().raw_decode(config)[0] if found else {}
        except json.JSONDecodeError:
            return {}

    def attribute(self, pattern: str) -> str:
        """Returns the first group of the first match of `pattern` in the attributes, or an empty string."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""

    def called(self, *attributes: str) -> tuple[str, ...]:
        """Returns the names of the computations in these attributes, such as `calls` or `body`."""
        return tuple(
            name
            for attribute in attributes
            for names in re.findall(rf"\b{attribute}=\{{?((?:%[\w.\-]+(?:, )?)+)", self.attributes)
            for name in re.findall(r"%([\w.\-]+)", names)
        )


@dataclasses.dataclass(frozen=True)
class Computation:
    """A list of instructions, each after its operands.

    Attributes:
        instructions: by name, in order.
    """

    instructions: Mapping[str, Instruction]

    def __iter__(self) -> Any:
        return iter(self.instructions.values())

    @property
    def root(self) -> Instruction:
        """The instruction whose result the computation returns."""
        return next(each for each in self if each.is_root)

    @cached_property
    def users(self) -> Mapping[str, list[Instruction]]:
        """For each instruction, the instructions that take its result."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for each in self:
            for operand in dict.fromkeys(each.operands):
                users[operand].append(each)
        return users

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """Returns the instructions whose results `instruction` takes."""
        return [self.instructions[name] for name in instruction.operands]

    def results(self, instruction: Instruction) -> tuple[Array, ...]:
        """Returns the arrays of its result. A `-start` lists its operands too; its `-done` does not."""
        last = instruction
        while last.opcode.endswith(("-start", "-update")) and self.users[last.name]:
            last = self.users[last.name][0]
        return last.arrays


@dataclasses.dataclass(frozen=True)
class Module:
    """A program.

    Attributes:
        computations: by name.
        entry: the computation that runs first.
    """

    computations: Mapping[str, Computation]
    entry: Computation


_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$")
# The metadata holds names that users gave, with any characters in them.
_METADATA = re.compile(r', metadata=\{((?:[^{}"]|"(?:[^"\\]|\\.)*"|\{[^{}]*\})*)\}')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,<=]*)\]")


def parse(text: str) -> Module:
    """Parses what `Compiled.as_text()` returns.

    Raises:
        ValueError: the text holds no program.
    """
    computations: dict[str, Computation] = {}
    instructions: dict[str, Instruction] = {}
    entry = None
    for line in text.split("\n"):
        if header := _HEADER.match(line):
            instructions = {}
            computations[header[2]] = Computation(instructions)
            if header[1]:
                entry = computations[header[2]]
        elif computations and (found := _INSTRUCTION.match(line)):
            root, name, shapes, opcode, rest = found.groups()
            inside, attributes = _split(rest)
            operands = (
                () if opcode in ("parameter", "constant") else tuple(re.findall(r"%([\w.\-]+)", inside))
            )
            metadata, attributes = _METADATA.search(attributes), _METADATA.sub("", attributes)
            if opcode == "parameter":
                attributes = f"parameter({inside}){attributes}"
            instructions[name] = Instruction(
                name, opcode, _arrays(shapes), operands, attributes, _op_name(metadata), bool(root)
            )
    if entry is None:
        raise ValueError("This is not the text of a compiled program: no ENTRY computation was found.")
    return Module(computations, entry)


def _arrays(shapes: str) -> tuple[Array, ...]:
    return tuple(
        Array(dtype, tuple(int(size.removeprefix("<=")) for size in sizes.split(",") if size))
        for dtype, sizes in _ARRAY.findall(shapes)
    )


def _op_name(metadata: re.Match[str] | None) -> str:
    found = metadata and _OP_NAME.search(metadata[1])
    if not found:
        return ""
    # The bytes are escaped as in C.
    return found[1].encode().decode("unicode_escape").encode("latin-1").decode("utf-8", "replace")


def _split(rest: str) -> tuple[str, str]:
    """Splits a text at the parenthesis that closes the operands."""
    depth = 1
    for index, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return rest[:index], rest[index + 1 :]
    return rest, ""
