"""Loss scales: none, static and dynamic, as immutable pytrees.

In float16, gradients up to 2**-25 become zero and gradients above 65504 become inf. Multiplying the loss by a
scale moves the gradients into the range between. Dividing them by the same scale makes them true again
(Micikevicius et al., Mixed Precision Training, section 3.2).
"""

import dataclasses
import functools
import math
import warnings
from typing import Any, Literal, Protocol, Self, TypeAlias, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from .._paths import shown
from .._text import Shown, fields_table
from .._tree import STATIC, at_least_float32, has_dtype, register_state, replace_leaves
from .scalars import LARGEST, SMALLEST, float32_scale, int32_count, is_number, number, whole_number
from .serialization import Saved

T = TypeVar("T")

# `OVERWRITE_WITH_GRADIENT` of Flax, whose `TrainState` puts these leaves in place of the old ones:
# https://github.com/google/flax/blob/v0.12.8/flax/training/train_state.py#L110.
_NO_GRADIENTS = "_overwrite_with_gradient"


@runtime_checkable
class LossScale(Protocol):
    """The interface of the three loss scales here, and of your own.

    A loss scale is a pytree. It passes through `jit`, `scan` and checkpoints, and is never changed in place.
    `scale` multiplies a loss, `unscale` divides gradients by the scale that scaled them, and `adjust` returns
    the scale of the next step.

    Examples:
        >>> isinstance(jmp.StaticLossScale(1024.0), jmp.LossScale)
        True
    """

    @property
    def loss_scale(self) -> Any:
        """The factor, a strongly typed float32 scalar."""
        ...

    def scale(self, tree: T) -> T:
        """Multiplies the floating and complex leaves of `tree` by the scale, in float32."""
        ...

    def unscale(self, tree: T) -> T:
        """Divides the floating and complex leaves of `tree` by the scale, in float32."""
        ...

    def adjust(self, grads_finite: Any) -> Self:
        """Returns the next step's scale; `grads_finite` says whether this step's gradients are finite."""
        ...


LossScaleLike: TypeAlias = LossScale | float | jax.Array
"""A loss scale, or a number: the `StaticLossScale` of this number."""


def is_loss_scale(value: Any) -> bool:
    """Whether `value` is a loss scale, and not the class of one."""
    # The class `DynamicLossScale` has defaults for its fields, and so all members of the protocol.
    return isinstance(value, LossScale) and not isinstance(value, type)


def as_loss_scale(value: Any) -> LossScale | None:
    """Returns a loss scale as it is, and a number as a `StaticLossScale`; None if `value` is neither."""
    if is_loss_scale(value):
        return value
    return StaticLossScale(value) if is_number(value) else None


@register_state
@dataclasses.dataclass(frozen=True)
class NoOpLossScale(Saved):
    """A scale of 1 that changes nothing, for float32 and bfloat16, whose range needs no scaling.

    Examples:
        >>> jmp.NoOpLossScale().scale(jnp.float16(3)).dtype
        dtype('float16')
    """

    @property
    def loss_scale(self) -> np.float32:
        """One."""
        return np.float32(1)

    def scale(self, tree: T) -> T:
        """Returns `tree` itself."""
        return tree

    def unscale(self, tree: T) -> T:
        """Returns `tree` itself."""
        return tree

    def adjust(self, grads_finite: Any) -> "NoOpLossScale":
        """Returns itself for any `grads_finite`."""
        del grads_finite
        return self


class _Scaling(Saved, Shown):
    """`scale` and `unscale` by `self.loss_scale`, for the scales that have one."""

    loss_scale: Any

    def _notebook_text(self) -> str:
        return fields_table(self)

    def scale(self, tree: T) -> T:
        """Multiplies the floating and complex leaves of `tree` by the scale.

        Args:
            tree: a loss, or any pytree. Its other leaves stay as they are.

        Returns:
            The tree, with half leaves as float32: a float16 loss of 1 times 65536 is not inf. Still, the
            gradient that flows back into a float16 loss is float16: compute the loss in float32.
        """
        return self._map(tree, lambda x, scale: x * scale)

    def unscale(self, tree: T) -> T:
        """Divides the floating and complex leaves of `tree` by the scale.

        Args:
            tree: gradients, or any pytree. Integers, booleans, PRNG keys, float0 and None stay as they are.
                So do leaves under the key `_overwrite_with_gradient`, which are statistics of fp8 layers that
                Flax returns in place of gradients.

        Returns:
            The tree, with half leaves as float32. The division is exact if the scale is a power of two.
        """
        divided = self._map(tree, lambda x, scale: x / scale)

        def is_statistic(path):
            return any(getattr(key, "key", None) == _NO_GRADIENTS for key in path)

        def choose(path, leaf, new):
            return leaf if is_statistic(path) else new

        return jax.tree_util.tree_map_with_path(choose, tree, divided)

    def _map(self, tree: T, operation: Any) -> T:
        def apply(leaf: Any) -> Any:
            if type(leaf) is complex or has_dtype(leaf, jnp.complexfloating):
                # JAX would make the scale complex, and (inf + 0j) * (2 + 0j) is inf + NaN j:
                # https://github.com/jax-ml/jax/issues/25679.
                return jax.lax.complex(apply(jnp.real(leaf)), apply(jnp.imag(leaf)))
            if type(leaf) is float or has_dtype(leaf, jnp.floating):
                # With `jax_enable_x64` JAX would make a Python float a float64.
                wide = jnp.asarray(np.float32(leaf) if type(leaf) is float else at_least_float32(leaf))
                return operation(wide, jnp.asarray(self.loss_scale).astype(wide.dtype))
            return leaf

        return jax.tree.map(apply, tree)


@register_state
@dataclasses.dataclass(frozen=True)
class StaticLossScale(_Scaling):
    """A constant scale.

    Attributes:
        loss_scale: the factor, shape `()`, float32. Any real number is cast to float32.

    Raises:
        ValueError: the scale is not a scalar, or is zero, subnormal, negative, NaN or inf.

    Examples:
        >>> scale = jmp.StaticLossScale(1024)
        >>> scale.unscale(scale.scale(jnp.float16(3)))
        Array(3., dtype=float32)
    """

    loss_scale: Any

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss_scale", float32_scale("loss_scale", self.loss_scale))

    def adjust(self, grads_finite: Any) -> "StaticLossScale":
        """Returns itself for any `grads_finite`."""
        del grads_finite
        return self


@register_state
@dataclasses.dataclass(frozen=True)
class DynamicLossScale(_Scaling):
    """A scale that seeks the largest value at which the gradients stay finite.

    It grows by `factor` on the `period`-th finite step in a row, as in jmp, torch and Apex, and backs off on
    a step with inf or NaN. It never becomes 0 or inf. It stays a power of two if it and the factors are.

    Attributes:
        loss_scale: the factor, shape `()`, float32. Any real number is cast to float32.
        counter: the finite steps since the last growth or back-off, shape `()`, int32; modulo the period.
        period: how many finite steps in a row make the scale grow, at most `2**31 - 1`. The default, 2000,
            is that of jmp and torch.
        factor: what the scale is multiplied by when it grows, 1 or above. With 1 the scale only falls.
        min_loss_scale: the smallest scale after a back-off; 0 means the smallest normal float32. A scale
            that starts below it, as jmp allows, does not back off.
        backoff_factor: what the scale is multiplied by on a non-finite step, between 0 and 1. None means
            `1 / factor`, or 0.5 for a factor of 1.
        max_loss_scale: the largest scale. A growth beyond it is left out. The default is the largest float32.
        hysteresis: how many non-finite steps to tolerate before backing off; 0 for none. Megatron-LM and
            DeepSpeed also count the step that backs off: their 2 is 1 here.
        hysteresis_refill: when the full tolerance is restored: "growth", when the scale grows, or "finite",
            on every finite step (DeepSpeed's `consecutive_hysteresis`).
        hysteresis_left: how many more non-finite steps are tolerated, shape `()`, int32; None if `hysteresis`
            is 0.

    Raises:
        ValueError: the scale is not a scalar, or is zero, subnormal, negative, NaN or inf; a setting is out
            of range; or the minimum or the scale is above the maximum.
        TypeError: a setting is traced, or the scale or a setting is not a number.
        UserWarning: the scale or its minimum is an integer (as in jmp).

    Examples:
        >>> scale = jmp.DynamicLossScale(1024.0, period=2)
        >>> scale = scale.adjust(jnp.bool_(True)).adjust(jnp.bool_(True))
        >>> float(scale.loss_scale), float(scale.adjust(jnp.bool_(False)).loss_scale)
        (2048.0, 1024.0)
    """

    loss_scale: Any = 2.0**15
    counter: Any = 0
    period: int = dataclasses.field(default=2000, metadata=STATIC)
    factor: float = dataclasses.field(default=2, metadata=STATIC)
    min_loss_scale: float = dataclasses.field(default=1.0, metadata=STATIC)
    _: dataclasses.KW_ONLY
    backoff_factor: float | None = dataclasses.field(default=None, metadata=STATIC)
    max_loss_scale: float = dataclasses.field(default=LARGEST, metadata=STATIC)
    hysteresis: int = dataclasses.field(default=0, metadata=STATIC)
    hysteresis_refill: Literal["growth", "finite"] = dataclasses.field(default="growth", metadata=STATIC)
    hysteresis_left: Any = None

    def __post_init__(self) -> None:
        for name in ("loss_scale", "min_loss_scale"):
            if type(value := getattr(self, name)) is int or has_dtype(value, jnp.integer):
                # As in jmp. The frames are this method, the generated `__init__` and the caller.
                message = f"Expected floating type for {name}. Got {jnp.result_type(value)}."
                warnings.warn(message, UserWarning, stacklevel=3)
        assign = functools.partial(object.__setattr__, self)  # The dataclass is frozen.
        for name in ("factor", "min_loss_scale", "max_loss_scale"):
            assign(name, number(name, getattr(self, name)))
        if self.backoff_factor is not None:
            assign("backoff_factor", number("backoff_factor", self.backoff_factor))
        assign("period", whole_number("period", self.period, minimum=1))
        assign("hysteresis", whole_number("hysteresis", self.hysteresis, minimum=0))
        _check_settings(self)
        assign("min_loss_scale", max(self.min_loss_scale, SMALLEST))
        assign("loss_scale", float32_scale("loss_scale", self.loss_scale, self.max_loss_scale))
        assign("counter", int32_count("counter", self.counter))
        left = self.hysteresis if self.hysteresis_left is None else self.hysteresis_left
        assign("hysteresis_left", int32_count("hysteresis_left", left) if self.hysteresis else None)

    def adjust(self, grads_finite: Any) -> "DynamicLossScale":
        """Returns the scale of the next step.

        Args:
            grads_finite: a boolean, shape `()`: whether the gradients that this scale scaled are finite on
                every device.

        Raises:
            ValueError: `grads_finite` is not a boolean scalar.
        """
        finite = _as_flag(grads_finite)
        scale = jnp.asarray(self.loss_scale)
        counted = jnp.asarray(self.counter) + 1
        # On the N-th finite step in a row, as jmp and torch: the counter starts again at 0 below.
        grow = finite & (counted == self.period)
        grown = scale * np.float32(self.factor)
        # The limit is rounded to float32 too: a limit of 0.7 is above the float32 number nearest to it.
        raised = jnp.where(grow & (grown <= np.float32(self.max_loss_scale)), grown, scale)
        back_off, left = self._spend_hysteresis(finite, grow)
        # `dataclasses.replace` would check the settings and copy the arrays again.
        return replace_leaves(
            self,
            loss_scale=jnp.where(back_off, self.backed_off(scale), raised),
            counter=jnp.where(finite, counted % self.period, 0),
            hysteresis_left=left,
        )

    def backed_off(self, scale: Any) -> jax.Array:
        """Returns the scale that `scale`, shape `()`, backs off to, which is at least the minimum."""
        scale = jnp.asarray(scale, jnp.float32)
        if self.backoff_factor is None:
            smaller = scale / np.float32(self.factor if self.factor > 1 else 2)
        else:
            smaller = scale * np.float32(self.backoff_factor)
        minimum = stop = np.float32(self.min_loss_scale)
        if math.frexp(self.min_loss_scale)[0] != 0.5:
            # A power of two stays one: it stops at the smallest power of two above the minimum.
            mantissa = jax.lax.bitcast_convert_type(scale, jnp.uint32) & 0x7FFFFF
            above = np.float32(2.0 ** math.frexp(self.min_loss_scale)[1])
            stop = jnp.where(mantissa == 0, above, minimum)
        # A scale that started below the minimum must not be raised to it.
        return jnp.minimum(scale, jnp.where(smaller < minimum, stop, smaller))

    def _spend_hysteresis(self, finite: jax.Array, grow: jax.Array) -> tuple[jax.Array, Any]:
        """Returns whether to back off now, and the tolerance that is left."""
        if not self.hysteresis:
            return ~finite, None
        left = jnp.asarray(self.hysteresis_left)
        refill = finite if self.hysteresis_refill == "finite" else grow
        spent = jnp.where(finite, left, jnp.maximum(left - 1, 0))
        return ~finite & (left == 0), jnp.where(refill, jnp.int32(self.hysteresis), spent)


def _as_flag(grads_finite: Any) -> jax.Array:
    """Returns what `adjust` was given as an array; a ValueError if it is not one boolean."""
    # A Python bool has neither a shape nor a dtype.
    shape, dtype = getattr(grads_finite, "shape", ()), getattr(grads_finite, "dtype", type(grads_finite))
    if shape != () or dtype not in (bool, jnp.bool_):
        raise ValueError(
            "adjust takes one boolean scalar, such as jmp.all_finite(grads) or jmp.grads_finite(opt_state). "
            f"Got {shown(grads_finite)}."
        )
    return jnp.asarray(grads_finite)


def _check_settings(scale: DynamicLossScale) -> None:
    """Raises a ValueError for a setting of `scale` that is out of range."""

    def require(condition: bool, name: str, allowed: str) -> None:
        if not condition:
            raise ValueError(f"DynamicLossScale: {name} should be {allowed}. Got {getattr(scale, name)}.")

    minimum, maximum, backoff = scale.min_loss_scale, scale.max_loss_scale, scale.backoff_factor
    require(1 <= scale.factor <= LARGEST, "factor", "1 or above and finite, in float32")
    is_valid = backoff is None or SMALLEST <= float(np.float32(backoff)) < 1
    require(is_valid, "backoff_factor", "None, or between 0 and 1 and a normal float32")
    require(0 <= minimum < math.inf, "min_loss_scale", "0 or above, and finite")
    require(
        SMALLEST <= maximum <= LARGEST, "max_loss_scale", "above 0 and a finite float32 that is not subnormal"
    )
    require(minimum <= maximum, "min_loss_scale", f"at most max_loss_scale, {maximum}")
    require(scale.hysteresis_refill in ("growth", "finite"), "hysteresis_refill", "'growth' or 'finite'")
