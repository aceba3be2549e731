"""The operations of torch.autocast's CUDA lists, what each is in JAX, and where ours runs it.

https://pytorch.org/docs/stable/amp.html#cuda-ops-that-can-autocast-to-float16 and the two lists after it. The
table of docs/operation-lists.md is made of `ROWS`; `tests/autocast/test_operation_lists.py` compares both.

In the expressions `x` and `w` are float32 arguments, `y` is a product of them (half by then), `z` another;
what an expression gives goes into one more product, which wants it in half; a loss is a scalar.
"""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Row:
    """Some operations of another library, and what becomes of them.

    Attributes:
        there: where the other library runs them; for torch float16, float32, or widest.
        here: where ours does: half, float32 or widest; of several operations, the decisive ones.
        names: the library's name of each, with the expression in JAX.
        why: why ours differs, or what should be known.
        decisive: the primitives that `here` speaks of, if not all.
    """

    there: str
    here: str
    names: dict[str, str]
    why: str = ""
    decisive: tuple[str, ...] = ()


PRODUCT = ("dot_general", "conv_general_dilated")

ROWS = (
    Row(
        "float16",
        "half",
        {
            "__matmul__": "x @ w",
            "matmul": "jnp.matmul(x, w)",
            "mm": "jnp.matmul(x, w)",
            "mv": "jnp.matmul(w, x[0])",
            "bmm": "jnp.einsum('bij,jk->bik', x[None], w)",
            "addmm": "jnp.ones(8) + x @ w",
            "addmv": "jnp.ones(8) + w @ x[0]",
            "addbmm": "jnp.einsum('bij,jk->ik', x[None], w)",
            "baddbmm": "jnp.ones(8) + jnp.einsum('bij,jk->bik', x[None], w)",
            "chain_matmul": "x @ w @ w",
            "multi_dot": "jnp.linalg.multi_dot([x, w, w])",
            "linear": "x @ w + jnp.ones(8)",
        },
        decisive=PRODUCT,
    ),
    Row(
        "float16",
        "half",
        {
            "conv1d": "conv(1)",
            "conv2d": "conv(2)",
            "conv3d": "conv(3)",
            "conv_transpose1d": "conv_transpose(1)",
            "conv_transpose2d": "conv_transpose(2)",
            "conv_transpose3d": "conv_transpose(3)",
        },
        decisive=PRODUCT,
    ),
    Row(
        "float16",
        "half",
        {
            "RNNCell": "jnp.tanh(x @ w + y @ w)",
            "LSTMCell": "jax.nn.sigmoid(x @ w + y @ w) * jnp.tanh(x @ w)",
            "GRUCell": "jax.nn.sigmoid(x @ w) * jnp.tanh(y @ w)",
            "scaled_dot_product_attention": "attention(y)",
        },
        why="the matmuls; a carry of `lax.scan` keeps its float32, a softmax runs in float32",
        decisive=PRODUCT,
    ),
    Row(
        "float16",
        "widest",
        {"prelu": "jnp.where(y > 0, y, 0.25 * y)", "addr": "jnp.outer(y[0], z[0])"},
        why="no Tensor Core runs them",
    ),
    Row(
        "float32",
        "float32",
        {
            "exp": "jnp.exp(y)",
            "expm1": "jnp.expm1(y)",
            "log": "jnp.log(y)",
            "log10": "jnp.log10(y)",
            "log1p": "jnp.log1p(y)",
            "log2": "jnp.log2(y)",
            "rsqrt": "lax.rsqrt(y)",
            "acos": "jnp.acos(y)",
            "asin": "jnp.asin(y)",
            "cosh": "jnp.cosh(y)",
            "sinh": "jnp.sinh(y)",
            "tan": "jnp.tan(y)",
            "erfinv": "lax.erf_inv(y)",
        },
    ),
    Row(
        "float32",
        "float32",
        {
            "__pow__": "y**3",
            "pow": "jnp.square(y)",
            "reciprocal": "1 / y",
            "__rdiv__": "2 / y",
            "__rtruediv__": "2 / y",
        },
        why="in bfloat16, which has float32's range, widest where other half operations read them",
        decisive=("integer_pow", "square", "div"),
    ),
    Row("float32", "float32", {"__rpow__": "2**y"}),
    Row(
        "float32",
        "float32",
        {
            "sum": "y.sum(0, keepdims=True)",
            "prod": "y.prod(0, keepdims=True)",
            "cumsum": "jnp.cumsum(y, 0)",
            "cumprod": "jnp.cumprod(y, 0)",
        },
    ),
    Row(
        "float32",
        "float32",
        {
            "softmax": "jax.nn.softmax(y)",
            "softmin": "jax.nn.softmax(-y)",
            "log_softmax": "jax.nn.log_softmax(y)",
        },
    ),
    Row("float32", "float32", {"softplus": "jax.nn.softplus(y)"}, decisive=("exp", "log1p")),
    Row(
        "float32",
        "float32",
        {
            "layer_norm": "jax.nn.standardize(y)",
            "group_norm": "jax.nn.standardize(y.reshape(4, 2, 4)).reshape(4, 8)",
            "normalize": "y / jnp.linalg.norm(y, axis=-1, keepdims=True)",
            "norm": "jnp.linalg.norm(y)",
            "renorm": "y * (1 / jnp.maximum(1, jnp.linalg.norm(y, axis=-1, keepdims=True)))",
            "dist": "jnp.linalg.norm(y - z)",
            "cdist": "jnp.linalg.norm(y[:, None] - z[None], axis=-1)",
            "pdist": "jnp.linalg.norm(y[:, None] - y[None], axis=-1)",
            "cosine_similarity": "optax.cosine_similarity(y, z)",
        },
    ),
    Row(
        "float32",
        "float32",
        {
            "mse_loss": "jnp.mean((y - x) ** 2)",
            "l1_loss": "jnp.mean(jnp.abs(y - x))",
            "smooth_l1_loss": "optax.huber_loss(y, x).mean()",
            "cross_entropy": "optax.softmax_cross_entropy_with_integer_labels(y, labels).mean()",
            "nll_loss": "-jnp.take_along_axis(jax.nn.log_softmax(y), labels[:, None], 1).mean()",
            "binary_cross_entropy_with_logits": "optax.sigmoid_binary_cross_entropy(y, x).mean()",
            "kl_div": "optax.kl_divergence(jax.nn.log_softmax(y), x).mean()",
            "poisson_nll_loss": "jnp.mean(jnp.exp(y) - x * y)",
            "soft_margin_loss": "jnp.mean(jnp.log1p(jnp.exp(-x * y)))",
            "hinge_embedding_loss": "jnp.mean(jnp.maximum(0, 1 - y))",
            "margin_ranking_loss": "jnp.mean(jnp.maximum(0, y - z))",
            "multi_margin_loss": "jnp.mean(jnp.maximum(0, 1 - y[:, :1] + y))",
            "multilabel_margin_loss": "jnp.mean(jnp.maximum(0, 1 - y[:, :1] + y))",
            "triplet_margin_loss": "jnp.maximum(0, jnp.linalg.norm(y - x) - jnp.linalg.norm(y - z) + 1)",
            "cosine_embedding_loss": "jnp.mean(1 - optax.cosine_similarity(y, z))",
        },
    ),
    Row(
        "an error",
        "float32",
        {"binary_cross_entropy": "-jnp.mean(x * jnp.log(y) + (1 - x) * jnp.log(1 - y))"},
        why="the logarithms run in float32; from a half probability prefer the one with logits",
    ),
    Row(
        "widest",
        "widest",
        {
            "addcdiv": "y + 0.5 * (z / y)",
            "addcmul": "y + 0.5 * (z * y)",
            "atan2": "jnp.atan2(y, z)",
            "cross": "jnp.cross(y[:, :3], z[:, :3])",
            "cat": "jnp.concatenate([y, z])",
            "stack": "jnp.stack([y, z])",
        },
    ),
    Row(
        "widest",
        "half",
        {"tensordot": "jnp.tensordot(x, w, 1)", "bilinear": "jnp.einsum('bi,ij,bj->bi', x, w, x)"},
        why="matmuls like any other",
        decisive=PRODUCT,
    ),
    Row("widest", "widest", {"grid_sample": "sample(y)"}, why="what it reads", decisive=("gather",)),
    Row(
        "widest",
        "float32",
        {"dot": "jnp.dot(y[0], z[0])"},
        why="a sum, which no Tensor Core runs",
        decisive=("dot_general",),
    ),
    Row(
        "widest",
        "float32",
        {"index_put": "y.at[0].set(1.0)", "scatter_add": "y.at[0].add(z[0])"},
        why="what they add up, and their gradients, are summed in float32",
        decisive=("scatter", "scatter-add"),
    ),
)


def table(library: str, rows: Sequence[Row]) -> str:
    """Returns rows as docs/operation-lists.md shows them."""
    lines = [f"| Operations | {library} | jmp_lite | Note |", "| --- | --- | --- | --- |"]
    for row in rows:
        names = " ".join(f"`{name}`" for name in row.names)
        lines.append(f"| {names} | {row.there} | {row.here} | {row.why} |")
    return "\n".join(lines)
