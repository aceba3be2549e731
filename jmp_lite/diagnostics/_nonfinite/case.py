"""An origin of inf or NaN, what else is known of it, and the operations from which its operands come."""

import dataclasses
import linecache
import re
from collections.abc import Collection, Mapping

import jax.numpy as jnp
import numpy as np

from .._values.sites import Path, Site
from .flow import Origin

Extent = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Case:
    """An origin, and what else is known.

    Attributes:
        origin: the origin.
        sites: all sites of the program.
        parameters: the names of the arguments that are differentiated.
        scale: the loss scale; None for a step.
        fitting: the largest smaller power of two at which the gradients are finite; None if there is none.
    """

    origin: Origin
    sites: Mapping[Path, Site]
    parameters: tuple[str, ...]
    scale: float | None
    fitting: float | None

    @property
    def site(self) -> Site:
        """The site of the origin."""
        return self.origin.site

    @property
    def dtype(self) -> str:
        """The name of the dtype of the result."""
        return self.site.dtype.name

    @property
    def is_derivative(self) -> bool:
        """Whether it is a part of the backward pass, or computed for it."""
        return self.site.direction == "backward" or self.origin.is_derivative

    def extent(self, number: int) -> Extent | None:
        """Returns the smallest and the largest element of an operand; None where they are not known."""
        if number >= len(self.origin.operands):
            return None
        return self.origin.operands[number] or self.site.number(number)

    def low(self, number: int) -> float:
        """Returns the smallest element of an operand; NaN where it is not known."""
        extent = self.extent(number)
        return np.nan if extent is None else extent[0]

    def has_zero(self, number: int) -> bool:
        """Whether 0 is between the smallest and the largest element of an operand."""
        extent = self.extent(number)
        return extent is not None and extent[0] <= 0 <= extent[1]

    def behind(self, number: int, names: Collection[str], steps: int = 6) -> Site | None:
        """Returns the nearest site, of an operation among `names`, from which an operand comes."""
        sources = self.site.sources
        level = [sources[number]] if number < len(sources) else []
        for _ in range(steps):
            sites = [self.sites[path] for path in level if path is not None]
            for site in sites:
                if site.operation in names:
                    return site
            level = [path for site in sites for path in site.sources]
        return None

    def on_the_line(self, names: Collection[str]) -> str:
        """Returns the operation among `names` that the same line of the program has; empty for none.

        JAX gives the operations of a derivative the line of the operation of which it is.
        """
        here = (site for site in self.sites.values() if site.line == self.site.line != "")
        return next((site.operation for site in here if site.operation in names), "")


def largest(dtype: np.dtype) -> float:
    """Returns the largest finite number of a dtype.

    Examples:
        >>> largest(np.dtype("float16"))
        65504.0
    """
    return float(jnp.finfo(dtype).max)


def lost_number(site: Site) -> float | None:
    """Returns a number of the program that is 0 in the dtype of a site; None if there is none on its line.

    JAX writes 0 into the program for such a number. So it is read from the line itself.
    """
    file, _, line = site.line.partition(" ")[0].rpartition(":")[0].rpartition(":")
    written = re.findall(r"\d+\.?\d*e-\d+|0?\.0\d*", linecache.getline(file, int(line)) if line else "")
    zero = lambda number: float(np.asarray(number, np.float32).astype(site.dtype)) == 0
    return next((float(text) for text in written if float(text) and zero(float(text))), None)
