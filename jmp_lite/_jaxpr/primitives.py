"""The table of primitives: one row says all that this library knows of one operation of JAX.

To teach autocast an operation, add one row to `_TABLE`: the name that `jax.make_jaxpr` prints, the category,
and the flags that hold. A test names every primitive of JAX that has no row.

The categories follow PyTorch's CUDA autocast (https://pytorch.org/docs/stable/amp.html) and TensorFlow's
auto_mixed_precision_lists.h. JAX makes their operations of smaller primitives: a layer norm is a `reduce_sum`
and an `rsqrt`, a softmax is an `exp` and a `reduce_sum`, a loss is a `log` or a square.
"""

import dataclasses
import enum
from types import MappingProxyType


class Category(enum.Enum):
    """In which precision an operation runs. The first five are the lists of `autocast`."""

    ALLOW = "allow"  # Half operands, half results.
    DENY = "deny"  # Float32 operands, float32 results.
    RANGE = "range"  # Deny in float16, infer in bfloat16.
    INFER = "infer"  # The widest type of the operands.
    MOVE = "move"  # Data is moved and not changed: each operand keeps its type.
    AS_TRACED = "as traced"  # The dtypes of the program.
    CALL = "call"  # Runs jaxprs: each operation inside is decided on its own.


@dataclasses.dataclass(frozen=True)
class Traits:
    """What the table says of one primitive."""

    category: Category  # The category by default.
    broadcasts: bool = False  # It broadcasts axes of size 1; the gradient of a broadcast operand is a sum.
    scales: bool = False  # An operand may leave the range of half where the result does not.
    # A move that copies elements; the gradient is a sum, so half values go through it in float32.
    copies: bool = False
    # A move that copies between devices; half values go out, which is half the traffic, and their gradients
    # come back in float32, since the transpose is a sum over the devices.
    gathers: bool = False
    pointwise: bool = False  # Computes each element on its own, as the parts of activation functions do.
    compares: bool = False  # Its results are booleans, which are lighter than its operands.
    # Each result is one of its operands, so that rounding before it and after it are the same.
    selects: bool = False
    # Rounding the operand to half changes the result by no more than rounding a number near 1 does.
    saturates: bool = False
    # Its derivative squares an operand, and the square may leave the range of float16: that of `div` at
    # https://github.com/jax-ml/jax/blob/jax-v0.10.2/jax/_src/lax/lax.py#L5098, that of `atan2` at #L4620.
    squares: bool = False
    keeps_elements: bool = False  # A move whose result has all elements of its operand and no others.
    # If its operand is the gradient of a weight, its result is still a gradient of that weight: moves,
    # transposes of moves, and sums of gradients.
    keeps_gradient: bool = False


_TABLE = """
# Tensor Cores run these: half operands, float32 accumulation in the hardware, a half result.
conv_general_dilated         allow
dot_general                  allow
ragged_dot_general           allow

# Functions that leave the range of half, or that magnify its rounding.
exp                          deny       pointwise
exp2                         deny       pointwise
expm1                        deny       pointwise
log                          deny       pointwise
log1p                        deny       pointwise
log2                         deny       pointwise
pow                          deny       broadcasts pointwise
rsqrt                        deny       pointwise
cbrt                         deny       pointwise
tan                          deny       pointwise
asin                         deny       pointwise
acos                         deny       pointwise
atan                         deny       pointwise
sinh                         deny       pointwise
cosh                         deny       pointwise
asinh                        deny       pointwise
acosh                        deny       pointwise
atanh                        deny       pointwise
erfc                         deny       pointwise
erf_inv                      deny
lgamma                       deny
digamma                      deny
polygamma                    deny
zeta                         deny
igamma                       deny
igammac                      deny
igamma_grad_a                deny
bessel_i0e                   deny
bessel_i1e                   deny
regularized_incomplete_beta  deny
one_minus_square             deny       pointwise
polynomial                   deny       pointwise

# Sums, within a device and across devices. `add_any` sums the gradients of a value that is used twice. An
# `inner_product` is a `dot_general` of vectors, or the gradient of one: no Tensor Core runs it.
inner_product                deny
reduce_sum                   deny       keeps_gradient
reduce_prod                  deny
reduce_window_sum            deny
cumsum                       deny
cumprod                      deny
cumlogsumexp                 deny
add_any                      deny       keeps_gradient
psum                         deny       keeps_gradient
psum_invariant               deny       keeps_gradient
reduce_scatter               deny       keeps_gradient

# These leave the range of float16 where a float32 program does not: the square of 256, the reciprocal of
# 1e-5. They are harmless in bfloat16, which has the range of float32. `x * x` counts as a `square` and `1 /
# x` as a `reciprocal`.
integer_pow                  range      pointwise
reciprocal                   range      pointwise
square                       range      pointwise

# Arithmetic and comparisons of two operands.
add                          infer      broadcasts pointwise
sub                          infer      broadcasts pointwise
mul                          infer      broadcasts scales pointwise
div                          infer      broadcasts scales pointwise squares
rem                          infer      broadcasts scales pointwise
atan2                        infer      broadcasts scales pointwise squares
nextafter                    infer      broadcasts
max                          infer      broadcasts pointwise selects
min                          infer      broadcasts pointwise selects
eq                           infer      broadcasts pointwise compares
ne                           infer      broadcasts pointwise compares
lt                           infer      broadcasts pointwise compares
le                           infer      broadcasts pointwise compares
gt                           infer      broadcasts pointwise compares
ge                           infer      broadcasts pointwise compares

# Functions of one value, element by element.
neg                          infer      pointwise
abs                          infer      pointwise
sign                         infer      pointwise
floor                        infer      pointwise
ceil                         infer      pointwise
round                        infer      pointwise
select_n                     infer      pointwise selects
clamp                        infer      pointwise selects
tanh                         infer      pointwise saturates
logistic                     infer      pointwise saturates
erf                          infer      pointwise
sin                          infer      pointwise
cos                          infer      pointwise
sqrt                         infer      pointwise
is_finite                    infer

# Other operations that run in the widest type of their operands. An `outer_product` is a `dot_general` that
# sums nothing; an `elementwise_product` is one in which at most one operand has axes of its own.
concatenate                  infer      keeps_gradient
pad                          infer      keeps_gradient
stack                        infer
dynamic_update_slice         infer      keeps_gradient
reduce_max                   infer      selects
reduce_min                   infer      selects
argmax                       infer
argmin                       infer
cummax                       infer
cummin                       infer
reduce_window_max            infer      selects
reduce_window_min            infer      selects
top_k                        infer
approx_top_k                 infer
eq_to                        infer
lt_to                        infer
le_to                        infer
outer_product                infer
elementwise_product          infer      scales

# Moves within a device.
reshape                      move       keeps_elements keeps_gradient
transpose                    move       keeps_elements keeps_gradient
squeeze                      move       keeps_elements keeps_gradient
rev                          move       keeps_elements keeps_gradient
slice                        move
dynamic_slice                move
split                        move
unstack                      move
copy                         move       keeps_elements keeps_gradient
name                         move       keeps_elements keeps_gradient
stop_gradient                move       keeps_elements
optimization_barrier         move       keeps_elements
sort                         move
device_put                   move       keeps_elements keeps_gradient
sharding_constraint          move       keeps_elements keeps_gradient
reshard                      move       keeps_elements keeps_gradient
layout_constraint            move       keeps_elements keeps_gradient

# Moves that copy elements: their transposes are sums.
broadcast_in_dim             move       copies keeps_elements keeps_gradient
tile                         move       copies keeps_elements
gather                       move       copies
pvary                        move       copies keeps_elements keeps_gradient

# Moves between devices.
all_gather                   move       gathers
all_to_all                   move
ppermute                     move
pmax                         move
pmin                         move

# Operations that run a typed function, or whose transposes do.
reduce                       as_traced
reduce_window                as_traced
select_and_scatter           as_traced
select_and_scatter_add       as_traced
select_and_gather_add        as_traced
scatter                      as_traced
scatter-add                  as_traced
scatter-max                  as_traced
scatter-min                  as_traced
scatter-mul                  as_traced
scatter-sub                  as_traced

# Exact bits, complex numbers, scaled products.
reduce_precision             as_traced
bitcast_convert_type         as_traced
iota                         as_traced
random_gamma                 as_traced
complex                      as_traced
real                         as_traced
imag                         as_traced
conj                         as_traced
fft                          as_traced
scaled_dot                   as_traced
scaled_matmul                as_traced

# Linear algebra: the kernels have no half version.
cholesky                     as_traced
eig                          as_traced
eigh                         as_traced
svd                          as_traced
schur                        as_traced
qr                           as_traced
lu                           as_traced
hessenberg                   as_traced
householder_product          as_traced
triangular_solve             as_traced
tridiagonal                  as_traced
tridiagonal_solve            as_traced

# Operations that run jaxprs: autocast goes inside. `calls.py` has a handler for each.
jit                          call
closed_call                  call
eval_jaxpr                   call
remat2                       call
custom_jvp_call              call
custom_vjp_call              call
custom_vmap_call             call
custom_linear_solve          call
composite                    call
shard_map                    call
cond                         call
scan                         call
while                        call
"""


def _parse(table: str) -> MappingProxyType[str, Traits]:
    # A flag is a field of `Traits`, so a misspelt one is an error of its constructor.
    rows = [line.split() for line in table.splitlines() if line and not line.startswith("#")]
    traits = {
        name: Traits(Category[category.upper()], **dict.fromkeys(flags, True))
        for name, category, *flags in rows
    }
    assert len(traits) == len(rows), "A primitive has two rows."
    return MappingProxyType(traits)


PRIMITIVES = _parse(_TABLE)
"""What the table says of each primitive, by name."""

_UNKNOWN = Traits(Category.AS_TRACED)


def traits_of(name: str) -> Traits:
    """Returns what the table says of the primitive `name`; one without a row stays as traced.

    Examples:
        >>> traits_of("mul").scales, traits_of("an_operation_of_a_user").category
        (True, <Category.AS_TRACED: 'as traced'>)
    """
    return PRIMITIVES.get(name, _UNKNOWN)
