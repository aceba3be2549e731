"""The casts to half around an operation that JAX left out, since their operands were in half already.

In `h = (x.astype(F16) @ a).astype(F16)` and `h.astype(F16) @ b` the jaxpr has one cast: that of `x`. If it is
left out, the others are casts as well. So where they are is read from the source.
"""

import ast
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from ..._jaxpr import Equation, Place, Span, inner_jaxprs
from .callers import argument, call_at, entering, is_parameter, is_returned, passes_on
from .conversions import OPERATORS, Cast, cast_of, conversion, end_of, is_operator, leaves_of
from .source import Source, assigned, expressions_at

Path: TypeAlias = tuple[Span, ...]
"""An expression, and the calls around it, inner first."""


class Casts(NamedTuple):
    """The casts to half in an expression: where each is, as `file.py:12:4 (function)`."""

    operands: dict[int, tuple[str, ...]]  # By the position of the operand that is cast; the last cast first.
    of_result: tuple[str, ...] = ()  # Those of the result, or of the name that it is assigned to.
    # By position, the expression of an operand, the expression around it, and the name of the function.
    given: Mapping[int, tuple[ast.expr, ast.AST, str]] = MappingProxyType({})
    returned: ast.AST | None = None  # The expression, if the function returns it.
    paths: frozenset[Path] = frozenset()  # Those of all casts that were found.

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


class _Found(NamedTuple):
    line: str
    path: Path


def _found(source: Source, node: ast.AST, cast: Cast, function: str, callers: Sequence[Place]) -> _Found:
    path = source.span(cast.at), *(caller.span for caller in callers)
    return _Found(_place_of(source, node, cast, function), path)


def _with_callers(source: Source, casts: Casts, callers: Sequence[Place]) -> Casts:
    """Adds the casts of the arguments and of the results of the functions around an operation."""
    found = {at: list(_casts_at(source, *operand, callers)) for at, operand in casts.given.items()}
    operands = {at: tuple(each.line for each in own) for at, own in found.items() if own}
    returned = list(_casts_of_call(source, casts.returned, callers)) if casts.returned is not None else []
    around = tuple(caller.span for caller in callers)
    paths = {each.path for own in (*found.values(), returned) for each in own}
    paths |= {(*path, *around) for path in casts.paths}
    of_result = (*casts.of_result, *(each.line for each in returned))
    return casts._replace(operands=operands, of_result=of_result, paths=frozenset(paths))


def _casts_at(
    source: Source, given: ast.expr, node: ast.AST, function: str, callers: Sequence[Place]
) -> Iterator[_Found]:
    """Yields where an operand of an expression is cast, the last cast first; a parameter also by callers.

    JAX knows the function around the expression as `function`.
    """
    while (cast := cast_of(source, given)) is not None:
        yield _found(source, node, cast, function, callers)
        given = cast.operand
    if not callers or not isinstance(given, ast.Name) or not is_parameter(source, given):
        return
    caller, *outer = callers
    found = call_at(caller)
    if found is not None and passes_on(found[1]):
        yield from _casts_at(source, given, node, function, outer)
    elif found is not None and (value := argument(source, given, caller, found)) is not None:
        yield from _casts_at(found[0], value, found[1], f"({caller.function})", outer)


def _casts_of_call(source: Source, node: ast.AST, callers: Sequence[Place]) -> Iterator[_Found]:
    """Yields where callers cast what a function returns."""
    for number, caller in enumerate(callers, start=1):
        if not is_returned(source, node) or (found := call_at(caller)) is None:
            return
        source, node = found
        for cast in _casts_of_result(source, node):
            yield _found(source, node, cast, f"({caller.function})", callers[number:])


def casts_entering(equation: Equation, places: Sequence[Place]) -> Casts:
    """Returns the casts of what branches take, and of that with which a loop starts.

    They and `places` are as in `casts_around`.
    """
    name = equation.primitive.name
    if name not in ("cond", "scan", "while") or not places or (found := call_at(places[0])) is None:
        return Casts({})
    source, call = found
    function, callers = f"({places[0].function})", places[1:]
    leaves = list(itertools.chain.from_iterable(leaves_of(source, each) for each in entering(call)))
    casts = [list(_casts_at(source, leaf, call, function, callers)) for leaf in leaves]
    # A `cond` closes over the arrays before these, and a `fori_loop` carries its indexes before them.
    body = inner_jaxprs(equation)[-1]
    carried = body.operands[body.constants :][: body.carried]
    pairs = list(zip(reversed(range(len(equation.invars)) if name == "cond" else carried), reversed(casts)))
    # A name may stand for several arrays, so that those before it have no known place.
    is_known = name != "cond" and len(carried) - len(casts) in (0, 1, 2)
    last = pairs if is_known else itertools.takewhile(lambda pair: pair[1], pairs)
    known = {n: own for n, own in last if own}
    lines = {n: tuple(each.line for each in own) for n, own in known.items()}
    return Casts(lines, paths=frozenset(each.path for own in known.values() for each in own))


def casts_of_operators(line: str) -> set[str]:
    """Returns the casts of the operands of all operators that begin at a line."""
    source, nodes = expressions_at(line)
    function = line.partition(" ")[2]
    pairs = [(node, name) for node in nodes for name in OPERATORS if is_operator(node, name)]
    found = (_casts_around(source, (node,), function, name) for node, name in pairs if source is not None)
    own = (_with_callers(source, each, ()) for casts in found for each in casts if source is not None)
    return {lines[0] for each in own for lines in each.operands.values()}


@functools.lru_cache(maxsize=4096)
def _casts_around(source: Source, nodes: Sequence[ast.AST], function: str, primitive: str) -> Sequence[Casts]:
    found = []
    others = [node for node in nodes if isinstance(node, (ast.Call, ast.Subscript))]
    is_promotion = primitive == "convert_element_type"
    # One that converts to a dtype of an unknown name, as in `x.astype(F32)`, may be no cast to half.
    is_known = is_promotion and len(nodes) == 1
    operators = [node for node in nodes if is_operator(node, primitive)]
    operators = [node for node in nodes if isinstance(node, ast.BinOp)] if is_promotion else operators
    for node in operators or others:
        if is_known or conversion(source, node) is None:
            every = enumerate(_operands(source, node, primitive))
            operands = {at: (each, node, function) for at, each in every}
            results = [_found(source, node, cast, function, ()) for cast in _casts_of_result(source, node)]
            returned = node if is_returned(source, node) else None
            paths = frozenset(each.path for each in results)
            found.append(Casts({}, tuple(each.line for each in results), operands, returned, paths))
    return found


def _place_of(source: Source, node: ast.AST, cast: Cast, function: str) -> str:
    """Returns where a cast is, of an expression in a function that JAX knows by a name."""
    # JAX may know the function here by another name, as that of a comprehension.
    is_here = source.functions_around(cast.call) == source.functions_around(node)
    return f"{source.place(cast.call)} {function}".strip() if is_here else source.line(cast.call)


def _casts_of_result(source: Source, node: ast.AST) -> Iterator[Cast]:
    """Yields the conversions of the value of an expression."""
    outer = source.outer.get(node)
    while isinstance(outer, ast.Subscript):
        node, outer = outer, source.outer.get(outer)
    cast = conversion(source, outer)
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
    start = end_of(statement)
    # The next statement that assigns the name may read the old value; in a loop any statement may.
    end = min((end_of(value) for value in values if end_of(value) > start), default=_NEVER)
    loops = [each for each in inside if isinstance(each, (ast.For, ast.While))]
    if loops := [each for each in loops if statement in ast.walk(each)]:
        start, end = (loops[0].lineno, 0), end_of(loops[0])
    for node in inside:
        cast = conversion(source, node)
        if cast is not None and start < end_of(cast.operand) <= end and _root(cast.operand) == name:
            yield cast


_NEVER = (10**9, 0)


def _root(node: ast.AST) -> str:
    """Returns the name of the array that an expression is a part of: `h` for `h[:, :4]`."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _operands(source: Source, node: ast.AST, primitive: str) -> list[ast.expr]:
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
        # A method of an array.
        case ast.Call(func=ast.Attribute(value=ast.Call() as array), args=args):
            return [array, *args]
        case ast.Call(func=ast.Attribute(value=ast.Name() as array), args=args) if source.is_local(array):
            return [array, *args]
        case ast.Call(args=args):
            return list(args)
        case ast.Subscript(value=array):
            return [array]
    return []
