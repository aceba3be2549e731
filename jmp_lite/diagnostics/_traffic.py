"""How many bytes a kernel reads and writes."""

from ._hlo import Array, Computation, Instruction, Module

_SAME_BYTES = ("bitcast", "reshape")
_LOOKUPS = ("dynamic-slice", "slice", "gather")
_UPDATES = ("dynamic-update-slice", "scatter")


def bytes_of(instruction: Instruction, computation: Computation, module: Module) -> int:
    """The bytes that a kernel reads and writes."""
    results = computation.results(instruction)
    written = [0 if _is_workspace(array, instruction, module) else array.size for array in results]
    if instruction.operation != "fusion":
        operands = computation.operands(instruction)
        read = [_read_by(instruction, place, computation) for place in range(len(operands))]
        if instruction.operation in _UPDATES:
            written = [new.size for new in _news(instruction, computation)]
        return sum(read) + sum(written)
    inside = module.computations[instruction.called("calls")[0]]
    read = [_bytes_read(each, inside) for each in inside if each.opcode == "parameter"]
    roots = inside.operands(inside.root) if inside.root.opcode == "tuple" else [inside.root]
    if len(roots) == len(written):
        written = list(map(min, written, (_bytes_written(root, inside) for root in roots)))
    return sum(read) + sum(written)


def _is_workspace(array: Array, instruction: Instruction, module: Module) -> bool:
    """Whether it is memory that a library asked for."""
    if array.dtype not in ("s8", "u8") or len(array.shape) != 1:
        return False
    inside = [each for name in instruction.called("calls") for each in module.computations[name]]
    return any(each.target for each in (instruction, *inside))


def _bytes_read(read: Instruction, inside: Computation) -> int:
    """What a kernel reads of what goes into it: of a slice or a lookup only what comes out of it."""
    total = 0
    for user in inside.users[read.name]:
        for place in (place for place, name in enumerate(user.operands) if name == read.name):
            if user.opcode in _SAME_BYTES:
                total += _bytes_read(user, inside)
            elif user.opcode in _UPDATES and not _only_returned(user, inside):
                total += read.size
            else:
                total += _read_by(user, place, inside)
    return min(total, read.size)


def _read_by(user: Instruction, place: int, computation: Computation) -> int:
    """What an operation reads of one of its operands; an update is in place."""
    if user.operation in _LOOKUPS and place == 0:
        return sum(array.size for array in computation.results(user))
    if user.operation == "scatter" and place < len(_news(user, computation)):
        return _news(user, computation)[place].size
    if user.operation == "dynamic-update-slice" and place == 0:
        return 0
    return computation.operands(user)[place].size


def _news(update: Instruction, computation: Computation) -> list[Instruction]:
    """What an update puts in, for each array that it changes."""
    operands = computation.operands(update)
    return operands[1:2] if update.operation == "dynamic-update-slice" else operands[len(operands) // 2 + 1 :]


def _only_returned(instruction: Instruction, inside: Computation) -> bool:
    """Whether nothing in the kernel reads it, but for further updates of it."""
    return all(
        (user.opcode == "tuple" and user.is_root)
        or (
            (user.opcode in _SAME_BYTES or (user.opcode in _UPDATES and user.operands[0] == instruction.name))
            and _only_returned(user, inside)
        )
        for user in inside.users[instruction.name]
    )


def _bytes_written(root: Instruction, inside: Computation) -> int:
    """What a kernel writes of one of its results: of an update in place only what is new."""
    written, whole = 0, root.size
    while root.opcode in (*_SAME_BYTES, *_UPDATES):
        if root.opcode in _UPDATES:
            written += sum(new.size for new in _news(root, inside))
        root = inside.instructions[root.operands[0]]
    # An update of what was made in the kernel writes all of it.
    return min(whole, written) if written and root.opcode == "parameter" else whole
