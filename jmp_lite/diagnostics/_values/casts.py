"""The casts to half around an operation that JAX left out, since their operands were in half already.

In `h = (x.astype(F16) @ a).astype(F16)` and `h.astype(F16) @ b` the jaxpr has one cast: that of `x`. If it is
left out, the others are casts as well. So where they are is read from the source.
"""

import ast
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeGuard

from ..._jaxpr import Equation, Place, inner_jaxprs
from .callers import argument, call_at, entering, is_parameter, is_returned, passes_on
from .source import Source, assigned, expressions_at, operands_of

_CONVERSIONS = ("astype", "asarray", "array", "convert_element_type")
_OPERATORS = {
    "dot_general": ast.MatMult,
    "add": ast.Add,
    "sub": ast.Sub,
    "mul": ast.Mult,
    "div": ast.Div,
    "pow": ast.Pow,
}


class Casts(NamedTuple):
    """The casts to half in an expression: where each is, as `file.py:12:4 (function)`."""

    operands: dict[int, tuple[str, ...]]  # By the position of the operand that is cast; the last cast first.
    of_result: tuple[str, ...] = ()  # Those of the result, or of the name that it is assigned to.
    # By position, the expression of an operand, the expression around it, and the name of the function.
    given: Mapping[int, tuple[ast.expr, ast.AST, str]] = MappingProxyType({})
    returned: ast.AST | None = None  # The expression, if the function returns it.

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines of the casts of operands."""
        return tuple(dict.fromkeys(itertools.chain.from_iterable(self.operands.values())))

    @property
    def edit(self) -> str:
        """The name of the edit of these lines."""
        return " and ".join(self.lines)

    def edits_of(self, position: int) -> frozenset[str]:
        """Returns the names of the edits that make an operand float32: of all these lines, or of its own."""
        return frozenset({self.edit, " and ".join(self.operands[position])})

    def only(self, is_kept: Callable[[str], bool]) -> "Casts":
        """Returns the casts on the lines that are kept."""
        kept = {position: tuple(filter(is_kept, lines)) for position, lines in self.operands.items()}
        operands = {position: lines for position, lines in kept.items() if lines}
        return self._replace(operands=operands, of_result=tuple(filter(is_kept, self.of_result)))


def casts_around(line: str, primitive: str, places: Sequence[Place] = ()) -> Sequence[Casts]:
    """Returns the casts of each expression that begins at a line and may have made an operation.

    If an operator may have made it, no other expression has. `places` has the expression that did, and the
    calls around it, inner first.
    """
    source, nodes = expressions_at(line)
    function = line.partition(" ")[2]
    if source is None:
        return ()
    exact = tuple(node for node in nodes if any(place.is_at(node) for place in places[:1])) or tuple(nodes)
    found = _casts_around(source, exact, function, primitive)
    every = [_with_callers(source, casts, places[1:]) for casts in found]
    # JAX promotes one operand of an operator with a conversion of its own.
    is_promotion = primitive == "convert_element_type" and any(isinstance(node, ast.BinOp) for node in exact)
    return [_of_promoted(casts) for casts in every] if is_promotion else every


def _of_promoted(casts: Casts) -> Casts:
    """Returns the casts around the conversion of one operand, which is the only one that is in half."""
    places = [*casts.operands.values()]
    return casts._replace(operands={0: places[0]} if len(places) == 1 else {}, of_result=())


def _with_callers(source: Source, casts: Casts, callers: Sequence[Place]) -> Casts:
    """Adds the casts of the arguments and of the results of the functions around an operation."""
    found = {at: tuple(_casts_at(source, *operand, callers)) for at, operand in casts.given.items()}
    operands = {at: lines for at, lines in found.items() if lines}
    returned = _casts_of_call(source, casts.returned, callers) if casts.returned is not None else ()
    return casts._replace(operands=operands, of_result=(*casts.of_result, *returned))


def _casts_at(
    source: Source, given: ast.expr, node: ast.AST, function: str, callers: Sequence[Place]
) -> Iterator[str]:
    """Yields where an operand of an expression is cast, the last cast first; a parameter also by callers.

    JAX knows the function around the expression as `function`.
    """
    while (cast := cast_of(source, given)) is not None:
        yield _place_of(source, node, cast, function)
        given = cast.operand
    if not callers or not isinstance(given, ast.Name) or not is_parameter(source, given):
        return
    caller, *outer = callers
    found = call_at(caller)
    if found is not None and passes_on(found[1]):
        yield from _casts_at(source, given, node, function, outer)
    elif found is not None and (value := argument(source, given, found[1])) is not None:
        yield from _casts_at(found[0], value, found[1], f"({caller.function})", outer)


def _casts_of_call(source: Source, node: ast.AST, callers: Sequence[Place]) -> Iterator[str]:
    """Yields where callers cast what a function returns."""
    for caller in callers:
        if not is_returned(source, node) or (found := call_at(caller)) is None:
            return
        source, node = found
        for cast in _casts_of_result(source, node):
            yield _place_of(source, node, cast, f"({caller.function})")


def casts_entering(equation: Equation, places: Sequence[Place]) -> dict[int, tuple[str, ...]]:
    """Returns the casts of what branches take, and of that with which a loop starts, by their operands.

    They and `places` are as in `casts_around`.
    """
    name = equation.primitive.name
    if name not in ("cond", "scan", "while") or not places or (found := call_at(places[0])) is None:
        return {}
    source, call = found
    function, callers = f"({places[0].function})", places[1:]
    leaves = list(itertools.chain.from_iterable(_leaves(source, each) for each in entering(call)))
    casts = [tuple(_casts_at(source, leaf, call, function, callers)) for leaf in leaves]
    # A `cond` closes over the arrays before these, and a `fori_loop` carries its indexes before them.
    body = inner_jaxprs(equation)[-1]
    carried = body.operands[body.constants :][: body.carried]
    pairs = list(zip(reversed(range(len(equation.invars)) if name == "cond" else carried), reversed(casts)))
    # A name may stand for several arrays, so that those before it have no known place.
    is_known = name != "cond" and len(carried) - len(casts) in (0, 1, 2)
    last = pairs if is_known else itertools.takewhile(lambda pair: pair[1], pairs)
    return {n: lines for n, lines in last if lines}


def casts_of_operators(line: str) -> set[str]:
    """Returns the casts of the operands of all operators that begin at a line."""
    source, nodes = expressions_at(line)
    function = line.partition(" ")[2]
    pairs = [(node, name) for node in nodes for name in _OPERATORS if is_operator(node, name)]
    found = (_casts_around(source, (node,), function, name) for node, name in pairs if source is not None)
    own = (_with_callers(source, each, ()) for casts in found for each in casts if source is not None)
    return {lines[0] for each in own for lines in each.operands.values()}


class Cast(NamedTuple):
    """A conversion to half."""

    call: ast.Call  # What takes the dtype, which may be in a function that makes this conversion alone.
    operand: ast.expr  # The array that it converts.


@functools.lru_cache(maxsize=4096)
def _casts_around(source: Source, nodes: Sequence[ast.AST], function: str, primitive: str) -> Sequence[Casts]:
    found = []
    others = [node for node in nodes if isinstance(node, (ast.Call, ast.Subscript))]
    is_promotion = primitive == "convert_element_type"
    operators = [node for node in nodes if is_operator(node, primitive)]
    operators = [node for node in nodes if isinstance(node, ast.BinOp)] if is_promotion else operators
    for node in operators or others:
        if _conversion(source, node) is None:
            operands = {at: (each, node, function) for at, each in enumerate(_operands(node, primitive))}
            results = (_place_of(source, node, cast, function) for cast in _casts_of_result(source, node))
            returned = node if is_returned(source, node) else None
            found.append(Casts({}, tuple(results), operands, returned))
    return found


def _place_of(source: Source, node: ast.AST, cast: Cast, function: str) -> str:
    """Returns where a cast is, of an expression in a function that JAX knows by a name."""
    # JAX may know the function here by another name, as that of a comprehension.
    is_here = source.functions_around(cast.call) == source.functions_around(node)
    return f"{source.place(cast.call)} {function}".strip() if is_here else source.line(cast.call)


def constants_at(line: str, primitive: str) -> list[str]:
    """Returns where the operands of an operation are scalars in half, such as `jnp.zeros((), dtype=H)`.

    A jaxpr has them as literals, without a line.
    """
    source, nodes = expressions_at(line)
    operators = [node for node in nodes if is_operator(node, primitive)]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    # Of the calls in `lax.scan(...)[0].astype(F32)`, the inner one has the operands.
    made = operators if operators else calls[-1:]
    if source is None or len(made) != 1:
        return []
    leaves = itertools.chain.from_iterable(_leaves(source, each) for each in operands_of(made[0]))
    found = (_constant(source, leaf) for leaf in leaves)
    return [source.line(call) for call in found if call is not None]


def _leaves(source: Source, node: ast.expr) -> Iterator[ast.expr]:
    """Yields the leaves of a tree that an expression or its name stands for, or that a lambda returns."""
    node = node.body if isinstance(node, ast.Lambda) else node
    values = list(source.values_of(node)) if isinstance(node, ast.Name) else []
    trees = [value for value in values if isinstance(value, (ast.Tuple, ast.List, ast.Dict))]
    yield from _flat(trees[0] if len(values) == len(trees) == 1 else node)


def _flat(node: ast.expr) -> Iterator[ast.expr]:
    children = node.values if isinstance(node, ast.Dict) else getattr(node, "elts", [node])
    for child in children:
        yield from [child] if child is node else _flat(child)


def _constant(source: Source, node: ast.expr) -> ast.Call | None:
    """Returns the call that makes a scalar in half, which an expression is, or the only one of its name."""
    if isinstance(node, ast.Name):
        values = (value for value in source.values_of(node) if not isinstance(value, ast.Name))
        found = [_constant(source, value) for value in values]
        own = [call for call in found if call is not None]
        return own[0] if len(own) == 1 else None
    if isinstance(node, ast.Call) and source.is_half_dtype(node.func):  # As `jnp.float16(0)`.
        return node
    if not isinstance(node, ast.Call) or not source.makes_half(node):
        return None
    value = _converted(node)
    is_scalar = _is_empty(value) or isinstance(value, ast.Constant)
    is_scalar |= isinstance(value, ast.Call) and any(map(_is_empty, value.args[:1]))
    return node if is_scalar else None


def _is_empty(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Tuple) and not node.elts


def is_operator(node: ast.AST, primitive: str) -> TypeGuard[ast.BinOp]:
    """Whether an expression is the operator of an operation, as `a @ b` is that of a `dot_general`."""
    return isinstance(node, ast.BinOp) and isinstance(node.op, _OPERATORS.get(primitive, ()))


def _casts_of_result(source: Source, node: ast.AST) -> Iterator[Cast]:
    """Yields the conversions of the value of an expression."""
    outer = source.outer.get(node)
    while isinstance(outer, ast.Subscript):
        node, outer = outer, source.outer.get(outer)
    cast = _conversion(source, outer)
    if cast is not None and cast.operand is node:
        yield cast
    if isinstance(outer, ast.Assign) and isinstance(outer.targets[0], ast.Name):
        yield from _casts_of_name(source, outer, outer.targets[0].id)


def _casts_of_name(source: Source, statement: ast.Assign, name: str) -> Iterator[Cast]:
    """Yields the conversions of what a statement assigns to a name."""
    function = next(iter(source.functions_around(statement)), None)
    if function is None:
        return
    inside, values = list(ast.walk(function)), assigned(function, ast.Name, name)
    start = _end(statement)
    # The next statement that assigns the name may read the old value; in a loop any statement may.
    end = min((_end(value) for value in values if _end(value) > start), default=_NEVER)
    loops = [each for each in inside if isinstance(each, (ast.For, ast.While))]
    if loops := [each for each in loops if statement in ast.walk(each)]:
        start, end = (loops[0].lineno, 0), _end(loops[0])
    for node in inside:
        cast = _conversion(source, node)
        if cast is not None and start < _end(cast.operand) <= end and _root(cast.operand) == name:
            yield cast


_NEVER = (10**9, 0)


def _end(node: Any) -> tuple[int, int]:
    return node.end_lineno, node.end_col_offset


def _root(node: ast.AST) -> str:
    """Returns the name of the array that an expression is a part of: `h` for `h[:, :4]`."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _operands(node: ast.AST, primitive: str) -> list[ast.expr]:
    """Returns the operands of an expression in the order of those of its operation."""
    match node:
        case ast.BinOp(left=left, right=right):
            return [left, right]
        # `jnp.where` and `lax.select` take the values in the other order.
        case ast.Call(func=func, args=[predicate, true, false]) if primitive == "select_n":
            is_same = ast.unparse(func).endswith("select_n")
            return [predicate, true, false] if is_same else [predicate, false, true]
        case ast.Call(args=[ast.List(elts=arrays) | ast.Tuple(elts=arrays), *args]):  # Of `concatenate`.
            return [*arrays, *args]
        case ast.Call(func=ast.Attribute(value=ast.Call() as array), args=args):  # A method of an array.
            return [array, *args]
        case ast.Call(args=args):
            return list(args)
        case ast.Subscript(value=array):
            return [array]
    return []


def cast_of(source: Source, node: ast.expr) -> Cast | None:
    """Returns the cast to half that an expression is, or that its name stands for."""
    if not isinstance(node, ast.Name):
        return _conversion(source, node)
    functions, values = source.functions_around(node), source.values_of(node)
    before = [value for value in values if _end(value) < (node.lineno, node.col_offset)]
    # The last value before this line, if no loop or branch lies between them.
    is_sure = len(values) == 1 or (functions and before and source.is_straight(functions[0], before[-1]))
    if not before or not is_sure or isinstance(before[-1], ast.Name):
        return None
    return cast_of(source, before[-1])


def _conversion(source: Source, node: ast.AST | None) -> Cast | None:
    """Returns an expression if it converts an array to half."""
    if not isinstance(node, ast.Call):
        return None
    if not source.makes_half(node):
        return _by_a_function(source, node)
    operand = _converted(node)
    is_conversion = ast.unparse(node.func).rpartition(".")[2] in _CONVERSIONS
    return Cast(node, operand) if is_conversion and operand is not None else None


def _by_a_function(source: Source, call: ast.Call) -> Cast | None:
    """Returns the conversion by a function of the program that does nothing else, such as `to_half(x)`."""
    functions = source.functions.get(ast.unparse(call.func).removeprefix("self."), [])
    value = source.returned_alone(functions[0]) if len(functions) == 1 else None
    if not isinstance(value, ast.Call) or not source.makes_half(value):
        return None
    parameters = (arg.arg for arg in functions[0].args.args if arg.arg != "self")
    arguments, converted = dict(zip(parameters, call.args)), _converted(value)
    operand = arguments.get(converted.id) if isinstance(converted, ast.Name) else None
    return Cast(value, operand) if operand is not None else None


def _converted(call: ast.Call) -> ast.expr | None:
    """Returns what a conversion takes."""
    if isinstance(call.func, ast.Attribute) and call.func.attr == "astype":
        return call.func.value
    return call.args[0] if call.args else None
