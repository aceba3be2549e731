"""Attention by `jmp.fuse_attention` beside the program as it is: first the numbers, then the time.

    python -m benchmarks.gpu.attention_time
    python -m benchmarks.gpu.attention_time --length 64 --steps 2 --blocks 2    # Anywhere: it works.

For each kind of mask, the result and the gradients of cuDNN's attention are compared with those of the same
function in float32, beside those of autocast without `fuse_attention`. A kind with twice the error of the
latter is a fault, and so is one that is not fused on a GPU. Then both are timed, forward and backward, in
turns. Without a GPU, JAX's own attention on half inputs stands for that of cuDNN.
"""

import functools
import pathlib
import statistics
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

import jmp_lite as jmp
from benchmarks.command import make_parser, write_json
from benchmarks.device import HAS_GPU, clocks, device_name, versions
from benchmarks.gpu.turns import take_turns

IMPLEMENTATION: Literal["cudnn", "xla"] = "cudnn" if HAS_GPU else "xla"
MASKED = -1e9
Change = Callable[..., jax.Array]


def _causal(scores: jax.Array) -> jax.Array:
    return jnp.tri(*scores.shape[-2:], dtype=bool)


def _window(scores: jax.Array) -> jax.Array:
    size = scores.shape[-1] // 4
    return _causal(scores) & ~jnp.tri(*scores.shape[-2:], k=-size, dtype=bool)


KINDS: dict[str, Change] = {
    "no mask": lambda s, *_: s,
    "causal": lambda s, *_: jnp.where(_causal(s), s, MASKED),
    "a window": lambda s, *_: jnp.where(_window(s), s, MASKED),
    "padding": lambda s, lengths, _: jnp.where(_padding(s, lengths), s, MASKED),
    "causal and padding": lambda s, lengths, _: jnp.where(_causal(s) & _padding(s, lengths), s, MASKED),
    "queries without a key": lambda s, lengths, _: jnp.where(
        _padding(s, lengths) & _padding(s, lengths).mT, s, MASKED
    ),
    "an added mask": lambda s, lengths, _: s + jnp.where(_padding(s, lengths), 0, MASKED),
    "a bias of heads": lambda s, _, bias: s + bias,
    "a bias and a mask": lambda s, _, bias: jnp.where(_causal(s), s + bias, jnp.finfo(jnp.float32).min),
}
"""What happens to scores; the lengths of the sequences and a bias of heads are arguments of the program."""


def _padding(scores: jax.Array, lengths: jax.Array) -> jax.Array:
    keys = jnp.arange(scores.shape[-1]) < lengths[:, None]
    return jnp.broadcast_to(keys[:, None, None], (len(lengths), 1, *scores.shape[-2:]))


def attend(change: Change, qkv: Any, lengths: jax.Array, bias: jax.Array) -> jax.Array:
    """An attention as programs write it; queries, keys and values have (batch, length, heads, features)."""
    q, k, v = qkv
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(change(scores, lengths, bias)), v)


def inputs(batch: int, length: int, heads: int, features: int) -> tuple[Any, ...]:
    """Returns queries, keys and values, lengths and a bias at random, and weights for the result."""
    keys = jax.random.split(jax.random.key(0), 5)
    normal = functools.partial(jax.random.normal, shape=(batch, length, heads, features))
    lengths = jax.random.randint(keys[3], (batch,), length // 2, length + 1)
    bias = jax.random.normal(keys[4], (heads, length, length))
    return tuple(map(normal, keys[:3])), lengths, bias, normal(jax.random.key(1))


def measure(sizes: tuple[int, int, int, int], dtype: Any, steps: int, blocks: int) -> dict[str, Any]:
    """Compares and times each kind of mask.

    Args:
        sizes: batch, length, heads and features.
        dtype: the half dtype.
        steps, blocks: as in `take_turns`.
    """
    arguments = inputs(*sizes)
    return {name: _measure_kind(change, arguments, dtype, steps, blocks) for name, change in KINDS.items()}


def _measure_kind(change: Change, arguments: Any, dtype: Any, steps: int, blocks: int) -> dict[str, Any]:
    *arrays, weights = arguments
    own = functools.partial(attend, change)
    fused = jmp.fuse_attention(own, dtype, implementation=IMPLEMENTATION)
    ways = {"float32": own, "autocast": jmp.autocast(own, dtype), "fused": jmp.autocast(fused, dtype)}
    (attention,) = jmp.explain(ways["fused"])(*arrays).attentions

    def gradients(run: Callable[..., jax.Array]) -> Any:
        def loss(*arrays: Any) -> tuple[jax.Array, jax.Array]:
            out = run(*arrays)
            return (out * weights).sum(), out

        return jax.jit(jax.grad(loss, (0, 2), has_aux=True))

    runs = {way: functools.partial(gradients(run), *arrays) for way, run in ways.items()}
    results = {way: jax.block_until_ready(run()) for way, run in runs.items()}
    halves = ("autocast", "fused")
    errors = {way: error(results[way], results["float32"]) for way in halves}
    times = take_turns({way: runs[way] for way in halves}, steps, blocks)
    return {
        "why_not": attention.why_not,
        "errors": errors,
        "ms": {way: statistics.median(each) for way, each in times.items()},
        "fault": fault(attention.why_not, errors, float(jnp.finfo(dtype).eps)),
    }


def fault(why_not: str, errors: dict[str, float], eps: float) -> str:
    """Returns how the results differ under a kind of mask, or an empty string if they agree."""
    if why_not:
        return f"not fused: {why_not}"
    most = 2 * errors["autocast"] + 2 * eps
    return "" if errors["fused"] <= most else f"an error of {errors['fused']:.1e}, more than {most:.1e}"


def error(actual: Any, expected: Any) -> float:
    """Returns the largest error of an array among results, as a part of its largest number."""
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected))
    return max(float(jnp.abs(a - b).max() / (jnp.abs(b).max() + 1e-30)) for a, b in pairs)


def main() -> None:
    """Measures each kind of mask, prints the errors and the times, and writes them as JSON."""
    parser = make_parser(__doc__)
    sizes = {"batch": 8, "length": 1024, "heads": 12, "features": 64}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--blocks", type=int, default=7)
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("out/attention_time.json"))
    options = parser.parse_args()
    chosen = {name: getattr(options, name) for name in sizes}
    kinds = measure(tuple(chosen.values()), jnp.dtype(options.dtype), options.steps, options.blocks)
    faults = {name: each["fault"] for name, each in kinds.items() if each["fault"]}
    write_json(
        options.json,
        {
            "device": device_name(),
            "versions": versions(),
            "implementation": IMPLEMENTATION,
            "sizes": chosen,
            "dtype": options.dtype,
            "kinds": kinds,
            "clocks": clocks(),
        },
    )
    for name, each in kinds.items():
        both = "  ".join(f"{way} {each['errors'][way]:.1e}, {each['ms'][way]:.3f} ms" for way in each["ms"])
        print(f"{name:24}{both}  {each['fault']}")
    if faults:
        raise SystemExit(f"Faults: {faults}")


if __name__ == "__main__":
    main()
