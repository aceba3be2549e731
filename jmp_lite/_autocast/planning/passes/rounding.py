"""The pass that rounds half values once more in a loop that its backward pass computes again.

By default XLA may leave out a cast down and up again. The forward pass then reads a value that was never
rounded, and the backward pass reads the rounded value that the loop has kept. A softmax that is computed from
both is not a softmax. XLA never leaves out a `reduce_precision`.
"""

import dataclasses

from ..plan import Action, Call, Plan, Product, Run, Take, WeightGradient
from ..rules import Rules


def rounding(plan: Plan, rules: Rules) -> Plan:
    """Rounds each half value that an operation of such a loop takes in float32."""
    del rules
    if not plan.analysis.context.recomputed:
        return plan
    return plan.with_decisions(
        [dataclasses.replace(each, action=_rounded(each.action)) for each in plan.decisions]
    )


def _rounded(action: Action) -> Action:
    if isinstance(action, (Run, Product, WeightGradient)):
        return dataclasses.replace(action, operands=_all_rounded(action.operands))
    if isinstance(action, Call):
        inner = tuple(
            dataclasses.replace(each, enter=_all_rounded(each.enter), leave=_all_rounded(each.leave))
            for each in action.inner
        )
        return dataclasses.replace(action, inner=inner)
    return action


def _all_rounded(takes: tuple[Take, ...]) -> tuple[Take, ...]:
    return tuple(Take.ROUNDED if take is Take.FLOAT32 else take for take in takes)
