"""The machine: how a jaxpr is traced, read and run again.

autocast, the tap of the diagnostics and the products of the Flax layers stand on it. In the order in
which to read it: `primitives` (the table of operations, one row each), `read` (how to read an equation),
`scopes` and `lines` (its scopes, and the lines that made it),
`precision` (the precisions of products), `axes` (the axes of moves and products), `softmax` (how a softmax
is written), `inner` (the jaxprs inside an equation), `forward` (how to follow facts about values through a
jaxpr), `bind` (how to repeat an equation), `arguments` (how a call of a user's function becomes a jaxpr),
`replay` (how a jaxpr runs again, with an action for each equation), `calls` (operations that run jaxprs,
such as loops), `products` (products whose gradients have dtypes of their own), `picks` (lookups whose
gradients need no scatter).

autocast takes what it needs from these files. All other rooms take the names below, and no others.
"""

from .arguments import Arguments as Arguments
from .arguments import check_function as check_function
from .arguments import has_objects as has_objects
from .arguments import in_two_calls as in_two_calls
from .arguments import trace as trace
from .axes import Labels as Labels
from .axes import labels_of_operands as labels_of_operands
from .axes import moved_axes as moved_axes
from .bind import INLINE as INLINE
from .bind import bind as bind
from .bind import cast as cast
from .calls import CALLS as CALLS
from .calls import Outputs as Outputs
from .calls import Side as Side
from .calls import while_loop as while_loop
from .forward import Forward as Forward
from .forward import dependence as dependence
from .inner import Inner as Inner
from .inner import Role as Role
from .inner import inner_jaxprs as inner_jaxprs
from .inner import with_inner_jaxprs as with_inner_jaxprs
from .lines import Span as Span
from .lines import calling_line as calling_line
from .lines import casting_line as casting_line
from .lines import is_of_lax as is_of_lax
from .lines import is_of_package as is_of_package
from .lines import source_line as source_line
from .lines import users_places as users_places
from .lines import users_stacklevel as users_stacklevel
from .precision import only_own_precisions as only_own_precisions
from .precision import precisions as precisions
from .primitives import PRIMITIVES as PRIMITIVES
from .primitives import Category as Category
from .primitives import traits_of as traits_of
from .products import Product as Product
from .products import product_with_wide_gradients as product_with_wide_gradients
from .products import replay_transpose as replay_transpose
from .read import Array as Array
from .read import Equation as Equation
from .read import Jaxpr as Jaxpr
from .read import Var as Var
from .read import all_equations as all_equations
from .read import constants as constants
from .read import describe as describe
from .read import equations as equations
from .read import is_float32 as is_float32
from .read import is_literal as is_literal
from .read import open_jaxpr as open_jaxpr
from .read import with_equations as with_equations
from .read import without_constants as without_constants
from .replay import replay as replay
from .scopes import FULL_PRECISION_SCOPE as FULL_PRECISION_SCOPE
from .scopes import FUSED_SCOPE as FUSED_SCOPE
from .scopes import call_scope as call_scope
from .scopes import context_of as context_of
from .scopes import flagged as flagged
from .scopes import flags_of as flags_of
from .scopes import is_by_autocast as is_by_autocast
from .scopes import is_of_gradient as is_of_gradient
from .scopes import is_recomputed as is_recomputed
from .scopes import is_transposed as is_transposed
from .scopes import scope_of as scope_of
from .softmax import moved_from as moved_from
from .softmax import softmax_input as softmax_input
