"""Parses the text of an optimized XLA program, the only public form in which JAX returns it.

It parses what a report needs: the computations and their instructions, with opcodes, the arrays of results,
the names of operands and attributes.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
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


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    name: str
    opcode: str  # `fusion`, `custom-call`, `copy`, ...
    arrays: tuple[HloArray, ...]  # The result, with tuples flattened.
    operand_names: tuple[str, ...]
    attributes: str  # The text after the operands, without the metadata.
    op_name: str  # The scopes and the name of the JAX operation that it comes from.
    is_root: bool  # Whether the computation returns its result.
    computation: "Computation" = dataclasses.field(repr=False)

    @property
    def size(self) -> int:
        return sum(array.size for array in self.arrays)

    @property
    def operands(self) -> list["Instruction"]:
        return [self.computation.instructions[name] for name in self.operand_names]

    @property
    def results(self) -> tuple[HloArray, ...]:
        # XLA splits an asynchronous instruction, such as an all-gather, into a `-start`, sometimes an
        # `-update`, and a `-done` (https://github.com/openxla/xla/pull/40232). The result of a `-start` also
        # holds its operands; that of a `-done` does not.
        last = self
        while last.opcode.endswith(("-start", "-update")) and last.users:
            last = last.users[0]
        return last.arrays

    @property
    def users(self) -> list["Instruction"]:
        return self.computation.users[self.name]

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

    def called(self, *attributes: str) -> list["Computation"]:
        """Returns the computations in these attributes, such as `calls` or `body`."""
        # `calls=%name`, or `branch_computations={%a, %b}`.
        lists = (rf"\b{attribute}=\{{?((?:%[\w.\-]+(?:, )?)+)" for attribute in attributes)
        found = [names for pattern in lists for names in re.findall(pattern, self.attributes)]
        names = [name for several in found for name in re.findall(r"%([\w.\-]+)", several)]
        return [self.computation.others[name] for name in names]


@dataclasses.dataclass(frozen=True, eq=False)
class Computation:
    """Instructions by name, each after its operands."""

    instructions: dict[str, Instruction]
    others: Mapping[str, "Computation"] = dataclasses.field(repr=False)  # All of the program.
    is_entry: bool

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    @property
    def root(self) -> Instruction:
        return next(instruction for instruction in self if instruction.is_root)

    @cached_property
    def users(self) -> Mapping[str, list[Instruction]]:
        """For each instruction, the instructions that take its result."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for user in self:
            for operand in dict.fromkeys(user.operand_names):
                users[operand].append(user)
        return users


# `ENTRY %main (p0: f32[8]) -> f32[8] {`, and `  ROOT %add.1 = f32[8]{0} add(%p0, %p0), metadata={...}`. Some
# versions of XLA leave out the percent signs of the definitions.
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$")
# The metadata holds names that users gave, with any characters in them.
_METADATA = re.compile(r', metadata=\{((?:[^{}"]|"(?:[^"\\]|\\.)*"|\{[^{}]*\})*)\}')
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_ARRAY = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,<=]*)\]")


def parse(text: str) -> Computation:
    """Parses what `Compiled.as_text()` returns. Returns the computation that runs first."""
    computations: dict[str, Computation] = {}
    computation = entry = None
    # Not `splitlines`: a user's scopes may contain characters that Python treats as line ends.
    for line in text.split("\n"):
        if header := _HEADER.match(line):
            computation = computations[header[2]] = Computation({}, computations, bool(header[1]))
            entry = computation if header[1] else entry
        elif computation is not None and (match := _INSTRUCTION.match(line)):
            root, name, shapes, opcode, rest = match.groups()
            inside, attributes = _split(rest)
            # The parentheses of a parameter hold its number, those of a constant its values.
            has_operands = opcode not in ("parameter", "constant")
            operands = tuple(re.findall(r"%([\w.\-]+)", inside)) if has_operands else ()
            metadata, attributes = _METADATA.search(attributes), _METADATA.sub("", attributes)
            own = name, opcode, _arrays(shapes), operands, attributes, _op_name(metadata), bool(root)
            computation.instructions[name] = Instruction(*own, computation)
    if entry is None:
        raise ValueError("This is not the text of a compiled program: no ENTRY computation was found.")
    return entry


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
