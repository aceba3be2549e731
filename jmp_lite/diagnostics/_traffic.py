"""How many bytes a kernel reads and writes."""

from ._hlo import Array, Computation, Instruction, Module


def bytes_of(instruction: Instruction, computation: Computation, module: Module) -> int:
    """The bytes that a kernel reads and writes."""
    operands = [operand.size for operand in computation.operands(instruction)]
    results = [array for array in instruction.arrays if not _is_workspace(array, instruction, module)]
    written = [array.size for array in results]
    if instruction.opcode == "fusion":
        inside = module.computations[instruction.called("calls")[0]]
        for each in inside:
            if each.opcode == "parameter":
                place = int(each.attribute(r"^parameter\((\d+)\)"))
                operands[place] = min(operands[place], _bytes_read(each, inside))
        roots = inside.operands(inside.root) if inside.root.opcode == "tuple" else [inside.root]
        if len(roots) == len(written):
            written = list(map(min, written, (_bytes_written(root, inside) for root in roots)))
    return sum(operands) + sum(written)


def _is_workspace(array: Array, instruction: Instruction, module: Module) -> bool:
    """Whether it is memory that a library asked for."""
    if array.dtype not in ("s8", "u8") or len(array.shape) != 1:
        return False
    inside = [each for name in instruction.called("calls") for each in module.computations[name]]
    return any(each.target for each in (instruction, *inside))


def _bytes_read(parameter: Instruction, inside: Computation) -> int:
    """What a kernel reads of one of its operands: of a slice or a lookup only what comes out of it."""
    read = 0
    for user in inside.users[parameter.name]:
        if user.opcode in ("bitcast", "reshape"):
            read += _bytes_read(user, inside)
        elif user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == parameter.name:
            read += user.size
        elif not (user.opcode == "dynamic-update-slice" and user.operands[0] == parameter.name):
            return parameter.size
    return read


def _bytes_written(root: Instruction, inside: Computation) -> int:
    """What a kernel writes of one of its results: of an update in place only what is new."""
    while root.opcode in ("bitcast", "reshape"):
        root = inside.instructions[root.operands[0]]
    if root.opcode == "dynamic-update-slice":
        return inside.instructions[root.operands[1]].size
    return root.size
