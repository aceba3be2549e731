"""The gradients of a train step that are all zero, or not scaled."""

from .._values.sites import Site
from .._values.trace import LossProgram, Measured


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


def holds_scale(program: LossProgram) -> bool:
    """Whether a step takes a loss scale, in the state of its optimizer or as an argument."""
    return any(map(_is_scale, program.names))


def is_unscaled(measured: Measured) -> bool:
    """Whether a step takes a loss scale, and nothing in its backward pass is computed from it."""
    sites, carried = measured.sites, measured.carried
    scaled = {
        path for path, site in sites.items() if site.operation == "argument" and _is_scale(site.argument)
    }
    backward = [path for path, site in sites.items() if site.direction == "backward"]
    found = bool(scaled)
    while found:  # Once, and once more for each loop around a value that it carries on.
        found = False
        for path in sorted(sites.keys() - scaled):
            if not scaled.isdisjoint((*sites[path].sources, carried.get(path))):
                scaled.add(path)
                found = True
    return bool(scaled and backward) and scaled.isdisjoint(backward)


def _is_scale(name: str) -> bool:
    return f"/{name}".endswith("/loss_scale/loss_scale")
