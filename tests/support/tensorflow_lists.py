"""The operations of TensorFlow's automatic mixed precision, what each is in JAX, and where ours runs it.

Source: `tensorflow/core/grappler/optimizers/auto_mixed_precision_lists.h`. The expressions are as in
`torch_lists.py`. Gradients, control flow and lists of tensors are left out.
"""

from tests.support.torch_lists import PRODUCT, Row

ROWS = (
    Row(
        "allow",
        "half",
        {
            "MatMul": "x @ w",
            "BatchMatMul": "jnp.einsum('bij,jk->bik', x[None], w)",
            "Einsum": "jnp.einsum('ij,jk->ik', x, w)",
            "Conv2D": "conv(2)",
            "Conv3D": "conv(3)",
            "LSTMBlockCell": "jax.nn.sigmoid(x @ w + y @ w) * jnp.tanh(x @ w)",
            "GRUBlockCell": "jax.nn.sigmoid(x @ w) * jnp.tanh(y @ w)",
        },
        decisive=PRODUCT,
    ),
    Row(
        "infer",
        "widest",
        {
            "Add": "y + z",
            "BiasAdd": "y + jnp.ones(8)",
            "Sub": "y - z",
            "Mul": "y * z",
            "RealDiv": "y / z",
            "Sqrt": "jnp.sqrt(y)",
            "Tanh": "jnp.tanh(y)",
            "Sigmoid": "jax.nn.sigmoid(y)",
            "Erf": "lax.erf(y)",
            "LeakyRelu": "jax.nn.leaky_relu(y)",
            "Softsign": "jax.nn.soft_sign(y)",
        },
    ),
    Row(
        "infer",
        "float32",
        {
            "Log": "jnp.log(y)",
            "Log1p": "jnp.log1p(y)",
            "Erfc": "lax.erfc(y)",
            "Inv": "1 / y",
            "Reciprocal": "1 / y",
            "Elu": "jax.nn.elu(y)",
            "Selu": "jax.nn.selu(y)",
            "Softplus": "jax.nn.softplus(y)",
            "Softmax": "jax.nn.softmax(y)",
            "LogSoftmax": "jax.nn.log_softmax(y)",
        },
        why="exponentials, logarithms and reciprocals leave float16's range",
        decisive=("exp", "expm1", "log", "log1p", "erfc", "div"),
    ),
    Row(
        "infer",
        "float32",
        {
            "Prod": "y.prod(0, keepdims=True)",
            "AvgPool": "lax.reduce_window(y, 0.0, lax.add, (2, 2), (1, 1), 'SAME') / 4",
            "FusedBatchNorm": "jax.nn.standardize(y, axis=0)",
        },
        why="sums and products over many elements",
        decisive=("reduce_prod", "reduce_window_sum", "reduce_sum"),
    ),
    Row(
        "deny",
        "float32",
        {
            "Exp": "jnp.exp(y)",
            "Expm1": "jnp.expm1(y)",
            "Pow": "y**z",
            "Sum": "y.sum(0, keepdims=True)",
            "Mean": "y.mean(0, keepdims=True)",
            "L2Loss": "jnp.sum(y * y) / 2",
            "SoftmaxCrossEntropyWithLogits": "optax.softmax_cross_entropy(y, x).mean()",
            "SparseSoftmaxCrossEntropyWithLogits": (
                "optax.softmax_cross_entropy_with_integer_labels(y, labels).mean()"
            ),
        },
    ),
    Row(
        "clear",
        "widest",
        {
            "Abs": "jnp.abs(y)",
            "Ceil": "jnp.ceil(y)",
            "ClipByValue": "jnp.clip(y, 0.0, 1.0)",
            "Concat": "jnp.concatenate([y, z])",
            "Floor": "jnp.floor(y)",
            "Max": "y.max(0, keepdims=True)",
            "MaxPool": "lax.reduce_window(y, -jnp.inf, lax.max, (2, 2), (1, 1), 'SAME')",
            "Maximum": "jnp.maximum(y, z)",
            "Minimum": "jnp.minimum(y, z)",
            "Neg": "-y",
            "Pad": "lax.pad(y, 0.0, [(1, -1, 0), (0, 0, 0)])",
            "Relu": "jax.nn.relu(y)",
            "Relu6": "jax.nn.relu6(y)",
            "Round": "jnp.round(y)",
            "Select": "jnp.where(y > 0, y, z)",
            "Sign": "jnp.sign(y)",
            "TopK": "lax.top_k(y, 8)[0]",
        },
    ),
    Row(
        "clear",
        "widest",
        {
            "BroadcastTo": "jnp.broadcast_to(y[:1], y.shape)",
            "ExpandDims": "y[None][0]",
            "Gather": "y[labels]",
            "Reshape": "y.reshape(2, 16).reshape(4, 8)",
            "Reverse": "y[::-1]",
            "Slice": "y[1:3]",
            "Split": "jnp.split(y, 2)[0]",
            "StopGradient": "lax.stop_gradient(y)",
            "Tile": "jnp.tile(y, (2, 1))",
            "Transpose": "y.T.reshape(4, 8)",
        },
        why="they move data",
        decisive=(
            *("broadcast_in_dim", "gather", "reshape", "rev", "slice", "split", "squeeze", "stop_gradient"),
            *("tile", "transpose", "concatenate"),
        ),
    ),
)
