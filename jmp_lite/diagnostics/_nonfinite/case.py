"""An origin of inf or NaN with everything that the advice about it depends on."""

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
    """An origin and its context.

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
        """Whether it is in the backward pass, or computed for it."""
        return self.site.direction == "backward" or self.origin.is_derivative

    def extent(self, number: int) -> Extent | None:
        """Returns the smallest and the largest element of an operand; None if they are not known."""
        if number >= len(self.origin.operands):
            return None
        return self.origin.operands[number] or self.site.number(number)

    def low(self, number: int) -> float:
        """Returns the smallest element of an operand; NaN if it is not known."""
        extent = self.extent(number)
        return np.nan if extent is None else extent[0]

    def has_zero(self, number: int) -> bool:
        """Whether 0 is between the smallest and the largest element of an operand."""
        extent = self.extent(number)
        return extent is not None and extent[0] <= 0 <= extent[1]

    def behind(self, number: int, names: Collection[str], steps: int = 6) -> Site | None:
        """Returns the nearest operation among `names` that an operand was computed from."""
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
        """Returns an operation among `names` on the same line of the program; empty if there is none.

        JAX gives the operations of a derivative the line of the operation that is differentiated.
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
    """Returns a number on the line of a site that is 0 in its dtype; None if there is none.

    The jaxpr has 0 for such a number, so it is read from the source.
    """
    file, _, line = site.line.partition(" ")[0].rpartition(":")[0].rpartition(":")
    written = re.findall(r"\d+\.?\d*e-\d+|0?\.0\d*", linecache.getline(file, int(line)) if line else "")
    zero = lambda number: float(np.asarray(number, np.float32).astype(site.dtype)) == 0
    return next((float(text) for text in written if float(text) and zero(float(text))), None)
