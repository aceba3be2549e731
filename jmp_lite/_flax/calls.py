"""One call of one module, or of a whole model, under a policy."""

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .._policy import Policy
from .._tree import at_least_float32, cast_floating, cast_leaf, has_dtype, is_half, reuse_cast
from .layers import Library, attributes, is_cell_call, is_layer, takes_dtype
from .products import wide_gradients

T = TypeVar("T")
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Precision:
    """How the modules of a model compute.

    Attributes:
        policy: the policy of the whole model.
        reduce_dtype: the dtype in which devices sum weight gradients; None for the compute dtype.
        returns_float32: whether a module that computes in half returns float32, and parameters of a user's
            module are float32 after they were rounded. All values between layers then have the dtypes of the
            plain model.
    """

    policy: Policy
    reduce_dtype: np.dtype | None
    returns_float32: bool = False

    def cast_param(self, value: T, path: str) -> T:
        """Casts the parameter of a user's module to the compute dtype of its `path`."""
        # Where it is used. If that is inside a scan, so is the cast, and the gradients of all uses are summed
        # in float32.
        value = cast_floating(value, self.policy.at(path).compute_dtype)
        return at_least_float32(value) if self.returns_float32 else value


def run_call(
    library: Library,
    module: Any,
    method: str,
    path: str,
    precision: Precision,
    changes: dict[str, Any],
    call: Callable[..., Any],
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Runs a `call` of `method` with attributes `changes`. `path` is that of the module in the model."""
    compute_dtype = np.dtype(precision.policy.at(path).compute_dtype)
    reduce_dtype, is_cell = precision.reduce_dtype, is_cell_call(library, module, method)
    calls_layer = is_layer(library, module) and method == "__call__"
    # A call of another method of a layer, such as `attend`, runs with the attributes of `changes` alone.
    of_layer, bias = dict[str, Any](), None
    if calls_layer:
        of_layer, bias = _as_layer(library, module, compute_dtype, reduce_dtype)
    if is_cell:
        args, kwargs = _strengthen_carry(args, kwargs)

    def run(**more: Any) -> Any:
        with attributes(module, {**changes, **of_layer, **more}):
            return call(*args, **kwargs)

    # Two lookups, in float32 for the gradient and in half for the value.
    if calls_layer and isinstance(module, library.embedding):
        keeps_rows = reduce_dtype is not None and _is_shared(*args, **kwargs)
        output: Any = _look_up(lambda dtype: run(dtype=dtype), compute_dtype, keeps_rows)
    else:
        output = run()
    if bias is not None:
        output = _add_bias(output, bias)
    if is_cell:
        output = _cast_cell_output(output, args[0] if args else kwargs["carry"], compute_dtype)
    if precision.returns_float32 and takes_dtype(library, module):
        output = _widen(output, compute_dtype, (args, kwargs))
    return output


def _as_layer(
    library: Library, module: Any, compute_dtype: np.dtype, reduce_dtype: np.dtype | None
) -> tuple[dict[str, Any], jax.Array | None]:
    """Returns the attributes with which a layer computes, and the bias that is added to its output."""
    bias = library.read_bias(module) if isinstance(module, library.biased) else None
    changes = {} if bias is None else dict(library.no_bias)
    if isinstance(module, library.products):
        adds_bias = bias is None and module.use_bias
        changes |= wide_gradients(module, compute_dtype, reduce_dtype, adds_bias)
    return changes, bias


def _add_bias(output: jax.Array, bias: jax.Array) -> jax.Array:
    """Adds a bias that is cast after it was broadcast, so that its gradient is summed in float32."""
    # The layers of Flax cast first
    # (https://github.com/google/flax/blob/v0.12.8/flax/linen/linear.py#L275): on a CPU, XLA then adds 40,960
    # ones in float16 to 4,096.
    return output + jnp.broadcast_to(bias, output.shape).astype(output.dtype)


def run_model(
    run: Callable[[Precision], Any],
    restore: Callable[[], None],
    precision: Precision,
    cast: Callable[[Any, np.dtype], Any],
    keeps_carry: bool,
) -> Any:
    """Runs a whole model, and casts its outputs to the output dtype.

    Args:
        run: runs the model and returns its outputs.
        restore: undoes what a run that failed has changed.
        precision: that of the model.
        cast: casts a tree of outputs.
        keeps_carry: whether the first output is a carry, which keeps its dtype.
    """
    try:
        output: Any = run(precision)
        is_done = True
    except (TypeError, jax.dtypes.TypePromotionError):  # The second one under strict promotion.
        # In a loop or a branch that mixes values in half and in float32, such as a float32 input, or a layer
        # that a rule keeps in float32, JAX finds that a carry changes its dtype or that branches differ.
        # With float32 between the layers it finds the dtypes of the plain model.
        if precision.returns_float32:
            raise
        output, is_done = None, False
    if not is_done:  # Not in the handler, which would show both errors.
        restore()
        output = run(dataclasses.replace(precision, returns_float32=True))
    output_dtype = np.dtype(precision.policy.output_dtype)
    if keeps_carry:
        return output[0], cast(output[1], output_dtype)
    return cast(output, output_dtype)


def _is_shared(inputs: Any) -> bool:
    """Whether indices have no batch, such as positions, so that their rows are shared by the batch."""
    return jnp.ndim(inputs) < 2 or jnp.shape(inputs)[0] == 1


def _look_up(read: Callable[[np.dtype], jax.Array], dtype: np.dtype, keeps_rows: bool) -> jax.Array:
    """Reads rows of an embedding table in half precision, with gradients that are summed in float32."""
    # The gradient of a row is the sum over all its uses, and such a sum stops growing in half precision: 256
    # + 1 is 256 in bfloat16. So the gradient is that of a lookup in float32. XLA removes the float32 lookup
    # itself, and devices that share a table gather it in half precision.
    wide = np.dtype(np.float32) if dtype.itemsize < 4 else dtype
    rows = read(wide)
    return rows if keeps_rows or dtype == wide else reuse_cast(rows, read(dtype))


def _strengthen_carry(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Returns the arguments of a cell with a strongly typed carry."""

    # A weakly typed float32 array, such as `jnp.full(shape, 0.5)`, takes the dtype of the half array that it
    # is added to (https://github.com/jax-ml/jax/pull/7666), so that the carry would be rounded inside the
    # cell.
    def strengthen(carry):
        return jax.tree.map(lambda leaf: cast_leaf(leaf, jnp.result_type(leaf)), carry)

    if args:
        return (strengthen(args[0]), *args[1:]), kwargs
    return args, kwargs | {"carry": strengthen(kwargs["carry"])}


def _cast_cell_output(output: tuple[Any, Any], carry: Any, dtype: np.dtype) -> tuple[Any, Any]:
    """Casts the new carry to the dtypes of the old one, as a scan needs, and the output to `dtype`."""
    new_carry, y = output
    new_carry = jax.tree.map(lambda new, old: cast_leaf(new, jnp.result_type(old)), new_carry, carry)
    return new_carry, jax.tree.map(lambda leaf: cast_leaf(leaf, dtype), y)


def _widen(output: Any, dtype: np.dtype, inputs: Any) -> Any:
    """Casts what a layer computed in a half `dtype` to the dtype that the plain layer returns."""
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(inputs) if has_dtype(leaf, jnp.floating)]
    wide = np.dtype(np.float64 if np.dtype(np.float64) in dtypes else np.float32)

    def is_rounded(leaf):
        return is_half(leaf) and leaf.dtype == dtype

    return jax.tree.map(lambda leaf: cast_leaf(leaf, wide) if is_rounded(leaf) else leaf, output)
