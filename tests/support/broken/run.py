"""One broken run: a small program, and what a diagnosis should name of it."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jmp_lite as jmp


@dataclasses.dataclass(frozen=True)
class Run:
    """A program that is broken, and its fault.

    Attributes:
        fun: a loss function, or a whole step. The faulty line ends with the comment `here`.
        args: the arguments.
        operation: the operation at which the fault begins; several where JAX's versions differ.
        says: words that the report should have of what was tried, or of its hint.
        step: whether `fun` is a whole step, with no gradients to take.
        finite: whether all results are finite, and wrong.
        scale: the loss scale.
        dtype: the dtype for `doctor`; None for float16.
        index: the index of the first bad element of an argument.
        rules: for a function of autocast in float16, its rules; None for a function that runs as it is.
        source: the public issue of which it is a small version.
        file: the library that has the faulty line, where it is not in `fun`.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    operation: tuple[str, ...]
    says: str
    step: bool = False
    finite: bool = False
    scale: float = 1.0
    dtype: str | None = None
    index: tuple[int, ...] | None = None
    rules: Mapping[str, str] | None = None
    source: str = ""
    file: str = ""

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.fun.__name__

    @property
    def given(self) -> Callable[..., Any]:
        """The function that the tools are given."""
        return self.fun if self.rules is None else jmp.autocast(self.fun, "float16", rules=self.rules)

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines of the fault, as `file.py:12:`; none for an argument, and for one by name alone."""
        if self.file:
            return (self.file,)
        lines, first = inspect.getsourcelines(self.fun)
        file = str(inspect.getsourcefile(self.fun)).rpartition("/")[2]
        return tuple(f"{file}:{first + n}:" for n, line in enumerate(lines) if line.endswith("# here\n"))


def broken(runs: list[Run], args: Any, operation: str, says: str = "", **settings: Any) -> Any:
    """Returns a decorator that adds a function to a list of runs. `operation` may name several, by spaces."""

    def add(fun: Callable[..., Any]) -> Callable[..., Any]:
        arguments = args if isinstance(args, tuple) else (args,)
        runs.append(Run(fun, arguments, tuple(operation.split()), says, **settings))
        return fun

    return add
