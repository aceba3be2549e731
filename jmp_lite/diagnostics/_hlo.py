"""Parses the text of an optimized XLA program, the one public form in which JAX gives it out.

Only what a report needs: computations, their instructions, and of those the opcode, the arrays that come out,
the names of the operands and the attributes.
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
        """Its bytes; none of a token, which only orders what happens."""
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
        arrays: what comes out, the parts of a tuple one after the other.
        operands: the names of what goes in.
        attributes: the text after the operands, without the metadata.
        op_name: the scopes and the name of the operation of JAX that it was made of.
        is_root: whether it is what the computation returns.
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
        """The bytes of what comes out."""
        return sum(array.size for array in self.arrays)

    @property
    def target(self) -> str:
        """The library function that a custom call calls, otherwise empty."""
        return self.attribute(r'custom_call_target="([^"]+)"')

    @property
    def operation(self) -> str:
        """The opcode; of what is waited for later too, without `-start`."""
        return self.opcode.removesuffix("-start")

    @cached_property
    def backend_config(self) -> dict[str, Any]:
        """What the backend decided about it; nothing if it is no JSON, as of a foreign function."""
        _, found, config = self.attributes.partition("backend_config=")
        try:
            return json.JSONDecoder().raw_decode(config)[0] if found else {}
        except json.JSONDecodeError:
            return {}

    def attribute(self, pattern: str) -> str:
        """The first group of the first match of `pattern` in the attributes, otherwise empty."""
        found = re.search(pattern, self.attributes)
        return found[1] if found else ""

    def called(self, *attributes: str) -> tuple[str, ...]:
        """The names of the computations that these attributes name, such as `calls` or `body`."""
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
        """What it returns."""
        return next(each for each in self if each.is_root)

    @cached_property
    def users(self) -> Mapping[str, list[Instruction]]:
        """For each instruction those that take what comes out of it."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for each in self:
            for operand in dict.fromkeys(each.operands):
                users[operand].append(each)
        return users

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """The instructions whose results `instruction` takes."""
        return [self.instructions[name] for name in instruction.operands]

    def results(self, instruction: Instruction) -> tuple[Array, ...]:
        """The arrays that come out of it: a `-start` lists its operands too, the `-done` for it does not."""
        last = instruction
        while last.opcode.endswith(("-start", "-update")) and self.users[last.name]:
            last = self.users[last.name][0]
        return last.arrays


@dataclasses.dataclass(frozen=True)
class Module:
    """A program.

    Attributes:
        computations: by name.
        entry: the one that is run.
    """

    computations: Mapping[str, Computation]
    entry: Computation


_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$")
# Names that a user gave are in here, with any letter in them.
_METADATA = re.compile(r', metadata=\{((?:[^{}"]|"(?:[^"\\]|\\.)*"|\{[^{}]*\})*)\}')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,<=]*)\]")


def parse(text: str) -> Module:
    """Parses what `Compiled.as_text()` returns.

    Raises:
        ValueError: there is no program in it.
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
    # Escaped as in C, byte for byte.
    return found[1].encode().decode("unicode_escape").encode("latin-1").decode("utf-8", "replace")


def _split(rest: str) -> tuple[str, str]:
    """Splits at the parenthesis that closes the operands."""
    depth = 1
    for place, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return rest[:place], rest[place + 1 :]
    return rest, ""
