"""How many bytes a kernel reads and writes."""

from .hlo import Array, Computation, Instruction, Module

_SAME_BYTES = ("bitcast", "reshape")
_LOOKUPS = ("dynamic-slice", "slice", "gather")
_UPDATES = ("dynamic-update-slice", "scatter")


def bytes_of(instruction: Instruction, computation: Computation, module: Module) -> int:
    """Returns the number of bytes that a kernel reads and writes."""
    results = computation.results(instruction)
    written = [0 if _is_workspace(array, instruction, module) else array.size for array in results]
    if instruction.operation != "fusion":
        operands = computation.operands(instruction)
        read = [_read_by(instruction, index, computation) for index in range(len(operands))]
        if instruction.operation in _UPDATES:
            written = [new.size for new in _updates(instruction, computation)]
        return sum(read) + sum(written)
    inside = module.computations[instruction.called("calls")[0]]
    read = [_bytes_read(each, inside) for each in inside if each.opcode == "parameter"]
    roots = inside.operands(inside.root) if inside.root.opcode == "tuple" else [inside.root]
    if len(roots) == len(written):
        written = list(map(min, written, (_bytes_written(root, inside) for root in roots)))
    return sum(read) + sum(written)


def _is_workspace(array: Array, instruction: Instruction, module: Module) -> bool:
    """Whether an array is memory for a library's own use."""
    if array.dtype not in ("s8", "u8") or len(array.shape) != 1:
        return False
    inside = [each for name in instruction.called("calls") for each in module.computations[name]]
    return any(each.target for each in (instruction, *inside))


def _bytes_read(read: Instruction, inside: Computation) -> int:
    """Returns the bytes that a kernel reads of one input. A slice or a lookup reads only its result."""
    total = 0
    for user in inside.users[read.name]:
        for index in (index for index, name in enumerate(user.operands) if name == read.name):
            if user.opcode in _SAME_BYTES:
                total += _bytes_read(user, inside)
            elif user.opcode in _UPDATES and not _only_returned(user, inside):
                total += read.size
            else:
                total += _read_by(user, index, inside)
    return min(total, read.size)


def _read_by(user: Instruction, index: int, computation: Computation) -> int:
    """Returns the bytes that an operation reads of its operand at `index`; an update works in place."""
    if user.operation in _LOOKUPS and index == 0:
        return sum(array.size for array in computation.results(user))
    if user.operation == "scatter" and index < len(_updates(user, computation)):
        return _updates(user, computation)[index].size
    if user.operation == "dynamic-update-slice" and index == 0:
        return 0
    return computation.operands(user)[index].size


def _updates(update: Instruction, computation: Computation) -> list[Instruction]:
    """Returns the new values that an update writes, for each array that it changes."""
    operands = computation.operands(update)
    return operands[1:2] if update.operation == "dynamic-update-slice" else operands[len(operands) // 2 + 1 :]


def _only_returned(instruction: Instruction, inside: Computation) -> bool:
    """Whether nothing in the kernel reads its result, except further updates of the same array."""
    return all(
        (user.opcode == "tuple" and user.is_root)
        or (
            (user.opcode in _SAME_BYTES or (user.opcode in _UPDATES and user.operands[0] == instruction.name))
            and _only_returned(user, inside)
        )
        for user in inside.users[instruction.name]
    )


def _bytes_written(root: Instruction, inside: Computation) -> int:
    """Returns the bytes that a kernel writes of one result. An update in place writes only the new values."""
    written, whole = 0, root.size
    while root.opcode in (*_SAME_BYTES, *_UPDATES):
        if root.opcode in _UPDATES:
            written += sum(new.size for new in _updates(root, inside))
        root = inside.instructions[root.operands[0]]
    # An update of an array that the kernel itself computes writes the whole array.
    return min(whole, written) if written and root.opcode == "parameter" else whole
