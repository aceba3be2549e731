"""The pass that makes one function of each region, such as a GELU or a softmax, which is computed again."""

import collections
import dataclasses
import itertools
from collections.abc import Mapping, Set

from ...._jaxpr.primitives import Category
from ...._jaxpr.read import Equation, Var
from ..plan import Decision, Plan, Recompute, Run, Skip, Take
from ..rules import Rules
from ..softmaxes import Barrier, Region
from ..states import HALF, Kind

_OF_ACTIVATIONS = {Category.DENY, Category.INFER}
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
    sums = _sums(plan, regions, inner)
    decisions = list(plan.decisions)
    for index, region in regions.items():
        decisions[index] = _recomputed(region, plan, sums)
    for index in inner.union(index for index, _ in sums.values()):
        decisions[index] = _skipped(decisions[index])
    return plan.with_decisions(decisions)


def _regions(plan: Plan) -> dict[int, Region]:
    """Returns the regions that are computed again, by their last operation."""
    analysis = plan.analysis
    regions: dict[int, Region] = {}
    for index, decision in enumerate(plan.decisions if analysis.regions else ()):
        region = analysis.region_of(decision.op, analysis.demand.of_results(decision.op))
        if region is not None and decision.gives_half and _is_half(region, plan):
            regions[index] = region
    return regions


def _skipped(decision: Decision) -> Decision:
    return dataclasses.replace(decision, action=Skip(), reason="part of that activation function or softmax")


def _is_half(region: Region, plan: Plan) -> bool:
    """Whether the sources of a region are in half, and no option keeps one of its operations as traced."""
    # A softmax may hold moves and casts (masks), and `jnp.where`, which is a call.
    categories = _OF_SOFTMAXES if region.barrier is Barrier.SOURCES else _OF_ACTIVATIONS
    kinds = {plan.states[var].kind for var in region.sources}
    # A source of a gate may be in float32, such as the result of a norm.
    in_half = kinds <= ({Kind.HALF, Kind.FLOAT32} if region.barrier is Barrier.NONE else {Kind.HALF})
    return in_half and {plan.decisions[index].category for index in region.members} <= categories


def _sums(plan: Plan, regions: Mapping[int, Region], inner: Set[int]) -> dict[Var, tuple[int, Run]]:
    """Returns the sums of a matmul's result and a bias that one activation function alone reads.

    For each, the index of its operation, and how it runs in half. `inner` are the operations that run inside
    of regions only.
    """
    # The activation function computes them again, so that XLA never writes them: 0.5 % of the time of a
    # transformer block of width 4096. If others read a sum too, it would be kept beside the matmul's result.
    # One of them may be an operation of the region: the `tanh` of `1 - tanh(x)**2`, if a matmul reads it.
    inside = {*inner, *regions}
    # Two functions of one sum would each round the cotangent of the matmul's result.
    counts = collections.Counter(itertools.chain(*(region.sources for region in regions.values())))
    alone = {
        var
        for region in regions.values()
        for var in region.sources
        if region.barrier is Barrier.CHECKPOINT
        and counts[var] == 1
        and plan.analysis.readers.are_only(var, region.members & inside)
    }
    sums: dict[Var, tuple[int, Run]] = {}
    for index, decision in enumerate(plan.decisions):
        action = decision.action
        # A bias is what an operation in half broadcasts (`in_half`).
        if isinstance(action, Run) and Take.BROADCAST in action.operands:
            sums.update(dict.fromkeys(alone.intersection(decision.op.equation.outvars), (index, action)))
    return sums


def _recomputed(region: Region, plan: Plan, sums: Mapping[Var, tuple[int, Run]]) -> Decision:
    def equation(index: int) -> Equation:
        return plan.decisions[index].op.equation

    members = sorted(region.members)  # The order of the program, so that the last one makes the result.
    own = {var: sums[var] for var in region.sources if var in sums}
    action = Recompute(
        region,
        tuple(map(equation, members)),
        {var: (equation(index), run) for var, (index, run) in own.items()},
    )
    last = plan.decisions[members[-1]]
    reason = "an activation function or softmax, computed in float32 from its half inputs, and recomputed"
    if region.logits is not None:
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
