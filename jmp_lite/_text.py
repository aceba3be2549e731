"""How reports are written: tables, powers of two, and notebooks."""

import html
import math
from collections.abc import Sequence


class Shown:
    """The base of a report: a notebook shows it as `print` shows it."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        # nbconvert's style gives a bare <pre> a proportional font, in which the columns do not line up.
        return f'<pre style="font-family: monospace">{html.escape(str(self))}</pre>'


def aligned(rows: Sequence[tuple[str, ...]], left: int = 1) -> list[str]:
    """Returns the lines of a table. The first `left` columns are aligned left, the others right.

    Examples:
        >>> aligned([("name", "size"), ("w", "12")])
        ['name  size', 'w       12']
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    sides = "<" * left + ">" * (len(widths) - left)
    return [
        "  ".join(f"{text:{side}{width}}" for text, side, width in zip(row, sides, widths)) for row in rows
    ]


def power(scale: float) -> str:
    """Returns a loss scale in words: as a power of two if it is one.

    Examples:
        >>> power(512.0), power(1000.0)
        ('2**9', '1000')
    """
    mantissa, exponent = math.frexp(scale)
    return f"2**{exponent - 1}" if mantissa == 0.5 else f"{scale:g}"
