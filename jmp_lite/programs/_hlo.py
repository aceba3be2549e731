"""Parses the text of an optimized XLA program, the only public form in which JAX returns it.

It parses what a report needs: the computations and their instructions, with opcodes, the arrays of results,
the names of operands and attributes.
"""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from functools import cached_property
from typing import Any


@dataclasses.dataclass(frozen=True)
class HloArray:
    """An array of a compiled program, as XLA names it."""

    dtype: str  # `f32`, `bf16`, `pred`, `f8e4m3fn`, ...
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of bytes; 0 for a token, which only orders instructions."""
        if self.dtype == "token":
            return 0
        bits = re.search(r"\d+", self.dtype)  # `pred` has no number of bits: XLA stores a bool in a byte.
        # XLA packs two numbers of 4 bits into a byte, and rounds up.
        return -(-math.prod(self.shape) * (int(bits[0]) if bits else 8) // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a computation."""

    name: str
    opcode: str  # `fusion`, `custom-call`, `copy`, ...
    arrays: tuple[HloArray, ...]  # The result, with tuples flattened.
    operands: tuple[str, ...]  # The names of the instructions whose results it takes.
    attributes: str  # The text after the operands, without the metadata.
    op_name: str  # The scopes and the name of the JAX operation that it comes from.
    is_root: bool  # Whether the computation returns its result.

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
        """The backend's settings for it; empty if they are not JSON, as for a foreign function."""
        _, _, config = self.attributes.partition("backend_config=")
        try:
            # Other attributes may stand behind the JSON: `raw_decode` stops at its end.
            return json.JSONDecoder().raw_decode(config)[0] if config else {}
        except json.JSONDecodeError:
            return {}

    def attribute(self, pattern: str) -> str:
        """Returns the first group of the first match of `pattern` in the attributes, or an empty string."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else ""

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
    """Instructions by name, each after its operands."""

    instructions: Mapping[str, Instruction]

    def __iter__(self) -> Any:
        return iter(self.instructions.values())

    @property
    def root(self) -> Instruction:
        """The instruction whose result the computation returns."""
        return next(instruction for instruction in self if instruction.is_root)

    @cached_property
    def users(self) -> Mapping[str, list[Instruction]]:
        """For each instruction, the instructions that take its result."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for user in self:
            for operand in dict.fromkeys(user.operands):
                users[operand].append(user)
        return users

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """Returns the instructions whose results `instruction` takes."""
        return [self.instructions[name] for name in instruction.operands]

    def results(self, instruction: Instruction) -> tuple[HloArray, ...]:
        """Returns the arrays of its result."""
        # XLA splits an asynchronous instruction, such as an all-gather, into a `-start`, sometimes an
        # `-update`, and a `-done`. The result of a `-start` holds its operands too, that of a `-done` not.
        last = instruction
        while last.opcode.endswith(("-start", "-update")) and self.users[last.name]:
            last = self.users[last.name][0]
        return last.arrays


@dataclasses.dataclass(frozen=True)
class HloModule:
    """A compiled program: its computations by name, and the one that runs first."""

    computations: Mapping[str, Computation]
    entry: Computation


# `ENTRY %main (p0: f32[8]) -> f32[8] {`, and `  ROOT %add.1 = f32[8]{0} add(%p0, %p0), metadata={...}`. Some
# versions of XLA leave out the percent signs of the definitions.
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$")
# The metadata holds names that users gave, with any characters in them.
_METADATA = re.compile(r', metadata=\{((?:[^{}"]|"(?:[^"\\]|\\.)*"|\{[^{}]*\})*)\}')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,<=]*)\]")


def parse(text: str) -> HloModule:
    """Parses what `Compiled.as_text()` returns."""
    computations: dict[str, Computation] = {}
    instructions: dict[str, Instruction] = {}
    entry = None
    # Not `splitlines`: a user's scopes may contain characters that Python treats as line ends.
    for line in text.split("\n"):
        if header := _HEADER.match(line):
            instructions = {}
            computations[header[2]] = Computation(instructions)
            if header[1]:
                entry = computations[header[2]]
        elif computations and (match := _INSTRUCTION.match(line)):
            root, name, shapes, opcode, rest = match.groups()
            inside, attributes = _split(rest)
            # The parentheses of a parameter hold its number, those of a constant its values.
            has_operands = opcode not in ("parameter", "constant")
            operands = tuple(re.findall(r"%([\w.\-]+)", inside)) if has_operands else ()
            metadata, attributes = _METADATA.search(attributes), _METADATA.sub("", attributes)
            instructions[name] = Instruction(
                name, opcode, _arrays(shapes), operands, attributes, _op_name(metadata), bool(root)
            )
    if entry is None:
        raise ValueError("This is not the text of a compiled program: no ENTRY computation was found.")
    return HloModule(computations, entry)


def _arrays(shapes: str) -> tuple[HloArray, ...]:
    # XLA writes a size that is known only on the device, up to a bound, as `<=8`.
    return tuple(
        HloArray(dtype, tuple(int(size.removeprefix("<=")) for size in sizes.split(",") if size))
        for dtype, sizes in _ARRAY.findall(shapes)
    )


def _op_name(metadata: re.Match[str] | None) -> str:
    name = metadata and _OP_NAME.search(metadata[1])
    if not name:
        return ""
    # XLA escapes quotes, and the bytes of UTF-8, as C does: "\\303\\251" is an e with an accent.
    return name[1].encode().decode("unicode_escape").encode("latin-1").decode("utf-8", "replace")


def _split(rest: str) -> tuple[str, str]:
    """Splits a text at the parenthesis that closes the operands."""
    depth = 1
    for index, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return rest[:index], rest[index + 1 :]
    return rest, ""
