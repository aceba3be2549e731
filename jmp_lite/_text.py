"""How reports are written: tables, powers of two, and notebooks."""

import contextlib
import dataclasses
import html
import math
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import Any


class Shown:
    """The base class of reports, which a notebook shows as `print` does, in a monospaced font."""

    __slots__ = ()

    def _notebook_text(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        # nbconvert's style gives a bare <pre> a proportional font and breaks lines: columns do not line up.
        style = "font: 85% monospace; white-space: pre; overflow-x: auto"
        return f'<pre style="{style}">{html.escape(self._notebook_text())}</pre>'


def aligned(rows: Sequence[tuple[str, ...]], left: int = 1) -> list[str]:
    """Returns the lines of a table. The first `left` columns are aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    sides = "<" * left + ">" * (len(widths) - left)
    return [
        "  ".join(f"{text:{side}{width}}" for text, side, width in zip(row, sides, widths)).rstrip()
        for row in rows
    ]


def fields_table(settings: Any) -> str:
    """Returns a line with name and value for each field of a dataclass that is not None."""
    pairs = ((field.name, getattr(settings, field.name)) for field in dataclasses.fields(settings))
    rows = [(name, _number(value)) for name, value in pairs if value is not None]
    return "\n".join(aligned(rows)) or str(settings)


def _number(value: Any) -> str:
    """Returns a number from 16 on as a power of two if it is one; other values as they print themselves."""
    try:
        return power(float(value)) if float(value) >= 16 else f"{float(value):g}"
    except (TypeError, ValueError):  # jax.errors.ConcretizationTypeError is a TypeError.
        return str(value)


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def dynamic_scale(exponent: int) -> str:
    """Returns the code of a dynamic loss scale that starts at a power of two; below 1 it needs a minimum."""
    minimum = ", min_loss_scale=2.0**-24" if exponent < 0 else ""
    return f"jmp.DynamicLossScale(2.0**{exponent}{minimum})"


def power(scale: float) -> str:
    """Returns a loss scale as a power of two, such as `2**9`, if it is one, and else as a number."""
    mantissa, exponent = math.frexp(scale)  # The mantissa is from 0.5 on, so that 8 is 0.5 * 2**4.
    return f"2**{exponent - 1}" if mantissa == 0.5 else f"{scale:g}"


WIDTH = 90
"""The columns of a report: a notebook and the pages of the documentation show no more."""


def wrapped(text: str, indent: int = 0, width: int = WIDTH) -> list[str]:
    """Returns the lines of a paragraph, at most `width` columns wide, all but the first indented more."""
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    wrapper.initial_indent, wrapper.subsequent_indent = " " * indent, " " * (indent + 4 if indent else 0)
    return wrapper.wrap(text)


def cell_of(file: str) -> str:
    """Returns the cell of a notebook that a file stands for, such as `cell 3`; empty for any other file."""
    # Imported by whoever runs a notebook, and by nobody else: this package does not import IPython.
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    name = None if shell is None else shell.compile.format_code_name(file)
    return f"cell {re.sub(r'[^0-9]', '', name[1])}" if name else ""


def _line_of_cell(match: re.Match[str]) -> str:
    cell = cell_of(match[1])
    return f"{cell}, line {match[2]}" if cell else match[0]


def shortened(text: str) -> str:
    """Returns a text in which the path of each file begins at the current directory, or at its package.

    The line of a notebook's cell is written `cell 3, line 12`.
    """
    if "IPython" in sys.modules:
        # A cell is a file in a temporary folder, whose name means nothing to a reader.
        text = re.sub(r"(\S+?):(\d+)(?::\d+)?", _line_of_cell, text)
    text = re.sub(r"\S*/(?:site|dist)-packages/", "", text)
    with contextlib.suppress(FileNotFoundError):  # The current directory was deleted.
        text = text.replace(os.getcwd().rstrip(os.sep) + os.sep, "")
    return re.sub(r"[\w.]+\.<locals>\.", "", text)  # Functions inside functions.
