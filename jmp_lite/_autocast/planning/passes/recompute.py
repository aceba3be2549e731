"""The pass that makes one function of each region, such as a GELU or a softmax, which is computed again."""

import dataclasses
import itertools
from collections.abc import Mapping

from ...._jaxpr.primitives import Category
from ..plan import Decision, Plan, Recompute, Skip
from ..rules import Rules
from ..softmaxes import Barrier, Region
from ..states import HALF, Kind

_OF_ACTIVATIONS = {Category.CALL, Category.DENY, Category.INFER, Category.MOVE}
_OF_SOFTMAXES = set(Category) - {Category.ALLOW}


def recompute(plan: Plan, rules: Rules) -> Plan:
    """Replaces the last operation of each region by the region, and skips the others."""
    # JAX would keep several float32 arrays of each region for the backward pass. One function of half values
    # keeps only these, or only its half result (`softmaxes`).
    del rules
    regions = _regions(plan)
    if not regions:
        return plan
    inner = _only_inside(plan, regions)
    decisions = list(plan.decisions)
    for index, region in regions.items():
        decisions[index] = _recomputed(region, plan)
    for index in inner:
        decisions[index] = _skipped(decisions[index])
    return plan.with_decisions(decisions)


def _regions(plan: Plan) -> dict[int, Region]:
    """Returns the regions that are computed again, by their last operation."""
    found = plan.analysis.regions
    return {
        index: found[out]
        for index, decision in enumerate(plan.decisions if found else ())
        for out in decision.op.equation.outvars
        if out in found and decision.gives_half and _is_half(found[out], plan)
    }


def _skipped(decision: Decision) -> Decision:
    return dataclasses.replace(
        decision, action=Skip(), reason="part of that function, which is computed in float32"
    )


def _is_half(region: Region, plan: Plan) -> bool:
    """Whether the sources of a region are in half, and no option keeps one of its operations as traced."""
    # A softmax may hold moves and casts (masks), and `jnp.where`, which is a call.
    categories = _OF_SOFTMAXES if region.barrier is Barrier.SOURCES else _OF_ACTIVATIONS
    # An input of a gate may be in float32, such as the result of a norm.
    inputs = region.inputs if region.barrier is Barrier.NONE else ()
    in_half = all(
        plan.states[var].is_half or (var in inputs and plan.states[var].kind is Kind.FLOAT32)
        for var in region.sources
    )
    return in_half and {plan.decisions[index].category for index in region.members} <= categories


def _recomputed(region: Region, plan: Plan) -> Decision:
    members = sorted(region.members)  # The order of the program, so that the last one makes the result.
    action = Recompute(region, tuple(plan.decisions[index].op.equation for index in members))
    last = plan.decisions[members[-1]]
    reason = "an activation function or softmax, computed in float32 from its half inputs, and recomputed"
    if region.is_chain:
        reason = (
            "a chain of operations, computed in float32 from its half inputs, rounded once, and recomputed"
        )
    elif region.logits is not None:
        reason = "a softmax, computed in float32 from its half inputs; only its half result is kept"
    elif not all(plan.states[var].is_half for var in region.sources):
        reason = (
            "a gate behind a norm, computed in float32 and stored in half, as is the gradient of its input"
        )
    return Decision(last.op, last.category, action, (HALF,), reason, changed=True)


def _only_inside(plan: Plan, regions: Mapping[int, Region]) -> set[int]:
    """Returns the indexes of the operations whose results only regions read."""
    readers = plan.analysis.readers
    taken = set(itertools.chain(*((*region.sources, *region.extras) for region in regions.values())))
    members = sorted(set().union(*(region.members for region in regions.values())), reverse=True)
    inner: set[int] = set()

    def reads_inside(reader: int, index: int) -> bool:
        return reader in inner or (reader in regions and index in regions[reader].members)

    # Backwards: whether an operation runs inside only depends on its readers, which stand behind it.
    for index in members:
        (out,) = plan.decisions[index].op.equation.outvars
        is_taken = out in taken or readers.outputs[out] > 0
        if not is_taken and all(reads_inside(reader, index) for reader in readers.operations[out]):
            inner.add(index)
    return inner
