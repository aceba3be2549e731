"""One call of one module, or of a whole model, under a policy."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._policy import Policy
from .._tree import cast_leaf, reuse_cast
from .layers import Library, attributes, is_cell_call, is_layer
from .products import wide_gradients

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def run_call(
    library: Library,
    module: Any,
    method: str,
    policy: Policy,
    reduce_dtype: np.dtype | None,
    changes: Mapping[str, Any],
    call: Callable[..., Any],
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Runs a `call` of `method` with attributes `changes`. `policy` is the policy at the module's path."""
    compute_dtype, is_cell = np.dtype(policy.compute_dtype), is_cell_call(library, module, method)
    calls_layer = is_layer(library, module) and method == "__call__"
    bias = library.read_bias(module) if calls_layer and isinstance(module, library.biased) else None
    changes = {**changes, **({} if bias is None else library.no_bias)}
    if calls_layer and isinstance(module, library.products):
        adds_bias = bias is None and module.use_bias
        changes |= wide_gradients(module, compute_dtype, reduce_dtype, adds_bias)
    if is_cell:
        args, kwargs = _strengthen_carry(args, kwargs)

    def run(**more: Any) -> Any:
        with attributes(module, {**changes, **more}):
            return call(*args, **kwargs)

    if calls_layer and isinstance(module, library.embedding):
        keeps_rows = reduce_dtype is not None and _is_shared(*args, **kwargs)
        return _look_up(lambda dtype: run(dtype=dtype), compute_dtype, keeps_rows)
    output: Any = run()
    if bias is not None:
        output = _add_bias(output, bias)
    if is_cell:
        output = _cast_cell_output(output, args[0] if args else kwargs["carry"], compute_dtype)
    return output


def run_model(
    run: Callable[..., Any],
    policy: Policy,
    cast: Callable[[Any, np.dtype], Any],
    keeps_carry: bool,
    args: Args,
    kwargs: Kwargs,
) -> Any:
    """Calls a whole model: casts its inputs to the compute dtype and its outputs to the output dtype."""
    carry, others = (args[:1], args[1:]) if keeps_carry else ((), args)
    kept = {name: value for name, value in kwargs.items() if name in ("carry", "initial_carry")}
    compute_dtype, output_dtype = np.dtype(policy.compute_dtype), np.dtype(policy.output_dtype)
    named = cast({name: value for name, value in kwargs.items() if name not in kept}, compute_dtype)
    output = run(*carry, *cast(others, compute_dtype), **named, **kept)
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
    wide = jnp.promote_types(dtype, jnp.float32)
    rows = read(wide)
    return rows if keeps_rows or dtype == wide else reuse_cast(rows, read(dtype))


def _add_bias(output: jax.Array, bias: jax.Array) -> jax.Array:
    """Adds a float32 bias to the last dimensions of the half precision output of a layer."""
    # The bias is cast after it was broadcast, so that its gradient is summed in float32. The layers of Flax
    # cast first: on a CPU, XLA then adds 40,960 ones in float16 to 4,096.
    return output + jnp.broadcast_to(bias, output.shape).astype(output.dtype)


def _strengthen_carry(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    """Returns the arguments of a cell with a strongly typed carry."""
    # A weakly typed float32 array, such as `jnp.full(shape, 0.5)`, takes the dtype of the half array that it
    # is added to, so that the carry would be rounded inside the cell.
    strengthen = lambda carry: jax.tree.map(lambda leaf: cast_leaf(leaf, jnp.result_type(leaf)), carry)
    if args:
        return (strengthen(args[0]), *args[1:]), kwargs
    return args, kwargs | {"carry": strengthen(kwargs["carry"])}


def _cast_cell_output(output: tuple[Any, Any], carry: Any, dtype: np.dtype) -> tuple[Any, Any]:
    """Casts the new carry to the dtypes of the old one, as a scan needs, and the output to `dtype`."""
    new_carry, y = output
    new_carry = jax.tree.map(lambda new, old: cast_leaf(new, jnp.result_type(old)), new_carry, carry)
    return new_carry, jax.tree.map(lambda leaf: cast_leaf(leaf, dtype), y)
