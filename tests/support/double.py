"""A function in another file than the rule that calls it."""


def double(x):
    return 2 * x
