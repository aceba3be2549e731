"""The pass that makes one function of each region, such as a GELU or a softmax, which is computed again.

JAX would keep several float32 arrays of each region for the backward pass. One function of half values keeps
only these.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from ...._jaxpr.primitives import Category
from ...._jaxpr.read import Equation, Var
from ..op import Readers
from ..plan import Decision, Plan, Recompute, Run, Skip, Take
from ..rules import Rules
from ..softmaxes import Region
from ..states import FLOAT32, HALF

_OF_ACTIVATIONS = {Category.DENY, Category.INFER}
_OF_SOFTMAXES = set(Category) - {Category.ALLOW}


def recompute(plan: Plan, rules: Rules) -> Plan:
    """Replaces the last operation of each region by the region, and skips the others."""
    del rules
    analysis, decisions = plan.analysis, list(plan.decisions)
    if not analysis.regions:
        return plan
    regions: dict[int, Region] = {}  # Those that are computed again, by their last operation.
    for index, decision in enumerate(decisions):
        region = analysis.region_of(decision.op, analysis.demand.of_results(decision.op))
        if region is not None and decision.gives_half and _is_half(region, plan, decisions):
            regions[index] = region
    if not regions:
        return plan
    sums = _sums(plan, regions)
    indexes = _skipped(analysis.readers, plan, regions).union(index for index, _ in sums.values())
    for index, region in regions.items():
        decisions[index] = _recomputed(region, plan, sums)
    for index in indexes:
        results = tuple(FLOAT32 if state.is_half else state for state in decisions[index].results)
        reason = "part of that activation function or softmax"
        decisions[index] = dataclasses.replace(
            decisions[index], action=Skip(), results=results, reason=reason
        )
    return plan.with_decisions(decisions)


def _is_half(region: Region, plan: Plan, decisions: Sequence[Decision]) -> bool:
    """Whether the sources of a region are in half, and no option keeps one of its operations as traced."""
    categories = _OF_SOFTMAXES if region.is_softmax else _OF_ACTIVATIONS
    in_half = all(plan.states[var].is_half for var in region.sources)
    return in_half and {decisions[index].category for index in region.members} <= categories


def _sums(plan: Plan, regions: Mapping[int, Region]) -> dict[Var, tuple[int, Run]]:
    """Returns the sums of a matmul's result and a bias that one activation function alone reads.

    For each, the index of its operation, and how it runs in half.

    The activation function computes them again, so that XLA never writes them: 0.5 % of the time of a
    transformer block of width 4096. If others read a sum too, it would be kept beside the matmul's result.
    """
    sums: dict[Var, tuple[int, Run]] = {}
    for index, decision in enumerate(plan.decisions):
        if isinstance(decision.action, Run) and Take.BROADCAST in decision.action.operands:
            (out,) = decision.op.equation.outvars
            for region in regions.values():
                is_source = out in region.sources and not region.is_softmax and region.needs_products
                if is_source and plan.analysis.readers.are_only(out, region.members):
                    sums[out] = index, decision.action
    return sums


def _recomputed(region: Region, plan: Plan, sums: Mapping[Var, tuple[int, Run]]) -> Decision:
    def equation(index: int) -> Equation:
        return plan.decisions[index].op.equation

    members = sorted(region.members)
    own = {var: sums[var] for var in region.sources if var in sums}
    action = Recompute(
        region,
        tuple(map(equation, members)),
        {var: (equation(index), run) for var, (index, run) in own.items()},
    )
    last = plan.decisions[members[-1]]
    reason = "an activation function or softmax, computed in float32 from its half inputs, and recomputed"
    return Decision(last.op, last.category, action, (HALF,), reason, changed=True)


def _skipped(readers: Readers, plan: Plan, regions: Mapping[int, Region]) -> set[int]:
    """Returns the indexes of the operations whose results only regions read."""
    taken = {var for region in regions.values() for var in (*region.sources, *region.extras)}
    skipped: set[int] = set()
    for index in sorted(set().union(*(region.members for region in regions.values())), reverse=True):
        (out,) = plan.decisions[index].op.equation.outvars
        by_regions = all(
            reader in skipped or (reader in regions and index in regions[reader].members)
            for reader in readers.operations[out]
        )
        if by_regions and not readers.outputs[out] and out not in taken:
            skipped.add(index)
    return skipped
