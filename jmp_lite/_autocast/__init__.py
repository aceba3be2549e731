"""autocast: mixed precision for any JAX function, by rewriting its jaxpr.

docs/how-autocast-works.md has the idea in about 180 lines. In the order in which to read the room: `planning`
(which decides about every operation) and its `passes`, `planner` (which runs them), `value`, `regions` and
`interpreter` (which carries a plan out), `traced_rule` (custom derivatives), `calls` (jit, loops), `keep`
(what keeps a part in float32), `api` (`autocast`). `report`, a face of its own, has what users are told.

Other rooms take the names below, and no others.
"""

from .api import given_rules as given_rules
from .api import make_plan as make_plan
from .api import run as run
from .api import settings_of as settings_of
from .interpreter import Interpreter as Interpreter
from .planner import Planner as Planner
from .planning.plan import Plan as Plan
from .planning.rules import Rules as Rules
from .planning.rules import make_rules as make_rules
from .value import Value as Value
