"""How many bytes a kernel reads and writes."""

from ._hlo import HloArray, Instruction

# These change the shape of a buffer, and read and write nothing.
_SAME_BYTES = ("bitcast", "reshape")
# A kernel computes only those elements of a cast or a slice that it goes on with.
_CASTS = ("convert", "reduce-precision")
# These read only the part of their first operand that they return.
_LOOKUPS = ("dynamic-slice", "slice", "gather")
# XLA gives their result the buffer of their first operand: they write only the new values into it.
_UPDATES = ("dynamic-update-slice", "scatter")


def bytes_of(instruction: Instruction) -> int:
    written = [0 if _is_workspace(array, instruction) else array.size for array in instruction.results]
    if instruction.operation != "fusion":
        read = [_read_by(instruction, index) for index in range(len(instruction.operands))]
        if instruction.operation in _UPDATES:
            written = [new.size for new in _updates(instruction)]
        return sum(read) + sum(written)
    inside = instruction.called("calls")[0]
    read = [_bytes_read(parameter) for parameter in inside if parameter.opcode == "parameter"]
    # A fusion with several results ends in a tuple of them. The tuple itself is no memory.
    roots = inside.root.operands if inside.root.opcode == "tuple" else [inside.root]
    if len(roots) == len(written):
        written = list(map(min, written, map(_bytes_written, roots)))
    return sum(read) + sum(written)


def _is_workspace(array: HloArray, instruction: Instruction) -> bool:
    """Whether an array is scratch memory of a library."""
    # A call of cuBLAS or cuDNN returns its scratch memory as a second result, an array of bytes with one axis
    # (https://github.com/openxla/xla/pull/11514). Its size is an upper bound for the library, and says
    # nothing about the bytes that are moved.
    if array.dtype not in ("s8", "u8") or len(array.shape) != 1:
        return False
    inner = [call for computation in instruction.called("calls") for call in computation]
    return any(call.target for call in (instruction, *inner))


def _bytes_read(array: Instruction) -> int:
    """Returns the bytes that a kernel reads of one input. A slice or a lookup reads only its result."""
    total = 0
    for user in array.users:
        for index in (index for index, name in enumerate(user.operand_names) if name == array.name):
            if user.opcode in _SAME_BYTES:
                total += _bytes_read(user)
            elif user.opcode in _CASTS and not user.is_root:
                total += _bytes_read(user) * array.size // max(user.size, 1)
            elif user.opcode in _LOOKUPS and index == 0 and not user.is_root:
                total += min(user.size, _bytes_read(user))
            elif user.opcode in _UPDATES and not _only_returned(user):
                total += array.size  # The kernel continues with the whole updated array.
            else:
                total += _read_by(user, index)
    # A kernel reads an element once from memory, and then again from a register or a cache.
    return min(total, array.size)


def _read_by(user: Instruction, index: int) -> int:
    """Returns the bytes that an operation reads of its operand at `index`; an update works in place."""
    if user.operation in _LOOKUPS and index == 0:
        return sum(array.size for array in user.results)
    if user.operation == "scatter" and index < len(_updates(user)):
        return _updates(user)[index].size
    if user.operation == "dynamic-update-slice" and index == 0:
        return 0
    return user.operands[index].size


def _updates(update: Instruction) -> list[Instruction]:
    """Returns the new values that an update writes, for each array that it changes."""
    operands = update.operands
    # A dynamic-update-slice takes the array, the new values, then a start for each axis. A scatter takes its
    # arrays, one array of indices, then as many arrays of new values.
    return operands[1:2] if update.operation == "dynamic-update-slice" else operands[len(operands) // 2 + 1 :]


def _only_returned(instruction: Instruction) -> bool:
    """Whether nothing in the kernel reads its result, except further updates of the same array."""

    def is_output(user):
        return user.opcode == "tuple" and user.is_root

    def updates(user):
        return user.opcode in _UPDATES and user.operand_names[0] == instruction.name

    def passes_on(user):
        return user.opcode in _SAME_BYTES or updates(user)

    return all(is_output(user) or (passes_on(user) and _only_returned(user)) for user in instruction.users)


def _bytes_written(root: Instruction) -> int:
    """Returns the bytes that a kernel writes of one result. An update in place writes only the new values."""
    written, whole = 0, root.size
    while root.opcode in (*_SAME_BYTES, *_UPDATES):
        if root.opcode in _UPDATES:
            written += sum(new.size for new in _updates(root))
        root = root.operands[0]
    # An update of an array that the kernel itself computes writes the whole array.
    return min(whole, written) if written and root.opcode == "parameter" else whole
