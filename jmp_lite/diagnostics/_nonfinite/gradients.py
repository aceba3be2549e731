"""The gradients of a train step that are all zero, or not scaled."""

from .._values.sites import Site, SiteKind
from .._values.trace import Measured


def zero_gradients(measured: Measured) -> tuple[bool, Site | None]:
    """Returns whether all gradients of a step are zero, and the first operation that makes one zero."""
    backward = {path for path, site in measured.sites.items() if site.direction == "backward"}
    read = {source for path in backward for source in measured.sites[path].sources}
    gradients = backward - read
    # A value without elements, of a branch that is not taken, is from inf to -inf.
    is_zero = lambda path: bool(
        (measured.records[path][..., 0] >= 0).all() and (measured.records[path][..., 1] <= 0).all()
    )
    if not gradients or not all(map(is_zero, gradients)):
        return False, None
    for path in sorted(backward):
        sources = [source for source in measured.sites[path].sources if source is not None]
        if is_zero(path) and sources and not any(map(is_zero, sources)):
            return True, measured.sites[path]
    return True, None


def is_unscaled(measured: Measured) -> bool:
    """Whether a step takes a loss scale, and nothing in its backward pass is computed from it."""
    sites = measured.sites.values()
    takes = any(site.kind is SiteKind.INPUT and site.is_scaled for site in sites)
    backward = [site for site in sites if site.direction == "backward"]
    return takes and bool(backward) and not any(site.is_scaled for site in backward)
