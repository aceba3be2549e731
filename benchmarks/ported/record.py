"""A train step that keeps what the page says of it: losses, times, skipped steps, the share in half."""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jmp_lite as jmp

Tree = Any
BAD_CALL = 20  # Before this call a step is tried that overflows. Its result is compared and thrown away.


@dataclasses.dataclass
class Recorder:
    """Calls a train step of a program, and measures it.

    Attributes:
        step: the program's own compiled step; None until `recorded` meets it.
        loss: the losses of a call, from what the step returned.
        params: the parameters among the arguments of a call.
        new_params: the parameters after a call, from its arguments and what it returned.
        spoil: makes arguments whose gradients are not finite; by default the loss scale becomes 2**127.
    """

    step: Callable[..., Any] | None
    loss: Callable[[Any], Any]
    params: Callable[[tuple[Any, ...]], Tree] = lambda args: args[0]
    new_params: Callable[[tuple[Any, ...], Any], Tree] = lambda args, result: result[0]
    spoil: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = None
    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    share: float | None = None
    skipped: int = 0
    bad_step_left_params: bool | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the step. Returns the result of the step."""
        assert self.step is not None, "The program compiled no step of this name."
        if self.share is None:
            self.share = share_in_half(self.step, args, kwargs)
        if len(self.seconds) == BAD_CALL and scale_states(args):
            self.try_bad_step(args, kwargs)
        start = time.process_time()  # CPU time: other processes of the machine do not count.
        result = jax.block_until_ready(self.step(*args, **kwargs))
        self.seconds.append(time.process_time() - start)
        self.losses += np.ravel(jax.device_get(self.loss(result))).tolist()
        states = scale_states(result) or scale_states(args)  # A step may change its arguments, as in NNX.
        self.skipped = max([0, *(int(np.ravel(arrays(state.counts)[0])[1]) for state in states)])
        return result

    def try_bad_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Calls the step with spoiled arguments, and keeps whether the parameters stayed as they were."""
        assert self.step is not None
        with jax.transfer_guard("allow"):  # big_vision forbids transfers.
            bad = (self.spoil or raise_scale)(jax.tree.map(copy, args))
            before = [np.array(leaf) for leaf in arrays(self.params(bad))]
            result = self.step(*bad, **kwargs)
            after = [np.array(leaf) for leaf in arrays(self.new_params(bad, result))]
        self.bad_step_left_params = len(before) == len(after) > 0 and all(map(np.array_equal, before, after))

    def summary(self) -> dict[str, Any]:
        """Returns the row of this run, for a JSON file."""
        later = statistics.median(self.seconds[1:])
        return {
            "losses": [round(loss, 6) for loss in self.losses],
            "first_call_seconds": round(self.seconds[0] - later, 2),
            "share": self.share,
            "skipped": self.skipped,
            "bad_step_left_params": self.bad_step_left_params,
        }


@contextlib.contextmanager
def recorded(owner: Any, name: str, function: str, recorder: Recorder) -> Iterator[None]:
    """Inside, `owner.name`, such as `jax.jit`, gives the recorder for the function with this name.

    For a step inside of a program's main. The recorder gets the compiled step.
    """
    compiler = getattr(owner, name)

    def compile_step(fun: Any = None, *args: Any, **kwargs: Any) -> Any:
        compiled = compiler(*(() if fun is None else (fun,)), *args, **kwargs)
        if getattr(fun, "__name__", None) != function:
            return compiled
        recorder.step = compiled
        return recorder

    setattr(owner, name, compile_step)
    try:
        yield
    finally:
        setattr(owner, name, compiler)


def arrays(tree: Tree) -> list[Any]:
    """Returns the arrays of a tree."""
    return [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, (jax.Array, np.ndarray))]


def copy(leaf: Any) -> Any:
    """Returns a copy of an array: a step may donate its arguments."""
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf


def is_scale_state(node: Any) -> bool:
    """Whether a node of a tree is the state of `with_loss_scale`."""
    return isinstance(node, jmp.SkipNonfiniteState)


def scale_states(tree: Tree) -> list[jmp.SkipNonfiniteState]:
    """Returns the states of `with_loss_scale` in a tree."""
    return [node for node in jax.tree.leaves(tree, is_leaf=is_scale_state) if is_scale_state(node)]


def with_inf(batch: Tree) -> Tree:
    """Returns a batch with an inf as the first number of each floating array."""

    def spoiled(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        return jnp.ravel(leaf).at[0].set(jnp.inf).reshape(leaf.shape)

    return jax.tree.map(spoiled, batch)


def raise_scale(args: Tree) -> Tree:
    """Returns the arguments with loss scales of 2**127, at which every gradient overflows."""

    def raised(path: tuple[Any, ...], leaf: Any) -> Any:
        is_scale = ".loss_scale.loss_scale" in jax.tree_util.keystr(path)
        return jnp.full_like(leaf, 2.0**127) if is_scale else leaf

    return jax.tree_util.tree_map_with_path(raised, args)


def share_in_half(step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Returns the share of the FLOPs of products that have half operands, from 0 to 1."""
    operations = jmp.explain(lambda *a, **k: step(*a, **k), "float32")(*args, **kwargs).operations
    products = [operation for operation in operations if operation.is_product]
    total = sum(operation.flops for operation in products)
    return sum(operation.flops for operation in products if operation.in_half) / total
