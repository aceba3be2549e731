"""The names of `jmp_lite` beside those that it imports: submodules, and what to write instead of other names.

A submodule loads when it is first asked for, so that `import jmp_lite` loads no Flax and no chex. So do the
names of `LAZY`: a training script that needs neither a report nor flash attention does not load them.
"""

import importlib
import sys
from typing import Any

SUBMODULES = {
    "diagnostics": (
        *("doctor", "find_nonfinite", "profile_ranges", "compare_precision"),
        *("Diagnosis", "Finding", "NonfiniteReport", "Nonfinite", "Trial", "RangeReport", "ModuleRange"),
        *("Magnitudes", "Fates", "PrecisionReport", "ModuleDifference", "Difference"),
    ),
    "programs": (
        *("read_program", "compile_for", "mesh_for", "roofline"),
        *("Program", "Matmul", "Collective", "Launch", "ModuleTime", "Roofline"),
    ),
    "testing": (
        *("assert_precision", "assert_tensor_cores", "assert_same_on_all_hosts", "assert_skips_nonfinite"),
    ),
    "linen": ("with_policy", "WithPolicy"),
    "nnx": ("with_policy",),
}

# Names of `jmp_lite` itself, and where they are.
LAZY = {
    "fuse_attention": "_attention.api",
    "explain": "_autocast.report.explain",
    "AutocastReport": "_autocast.report.explain",
    "AutocastAttention": "_autocast.report.attentions",
    "AutocastOperation": "_autocast.report.operations",
}

# Importable, but not among the names that a completion lists: the types of results and states, and `unscale`,
# which is for gradients of a loss that a program has scaled by itself.
RESULTS = {"AutocastAttention", "AutocastOperation", "AutocastReport", "LossScale", "SkipNonfiniteState"}
UNLISTED = {*RESULTS, "unscale"}

HOLDS_THE_SCALE = "`jmp_lite.with_loss_scale(optimizer)`, and `jmp_lite.value_and_grad(loss_fn, scale)`"
# Names of other libraries, and former names: what to write.
OTHERWISE = {
    # torch.amp, Apex
    "GradScaler": HOLDS_THE_SCALE,
    "amp": "`jmp_lite.autocast(loss_fn)`",
    "custom_fwd": "`jmp_lite.full_precision(fun)` for float32; autocast sees the rules of a `jax.custom_vjp`",
    "scale_loss": "`jmp_lite.value_and_grad(loss_fn, scale)`",
    "initialize": "`jmp_lite.get_policy('O1')`",
    "master_params": "`jmp_lite.get_master_params(opt_state)`",
    # Keras, Flax, mpx, optax
    "LossScaleOptimizer": HOLDS_THE_SCALE,
    "DynamicScale": "`jmp_lite.DynamicLossScale`",
    "DynamicLossScaling": "`jmp_lite.DynamicLossScale`",
    "force_full_precision": "`jmp_lite.full_precision(fun)`",
    "filter_grad": "`jmp_lite.grad(loss_fn, scale)`",
    "filter_value_and_grad": "`jmp_lite.value_and_grad(loss_fn, scale)`",
    "apply_if_finite": "`jmp_lite.skip_nonfinite(optimizer)`",
    # Former names
    "cast_state": "`jmp_lite.with_half_state(optimizer)`",
    "keep_f32": "`jmp_lite.keep_float32(x)`",
    "metrics": "`jmp_lite.get_metrics(opt_state)`",
    "resume": "`jmp_lite.migrate_state`",
    "scale_layer": "`jmp_lite.with_layer_loss_scale(fun)`",
    "skipped_steps": "`jmp_lite.get_metrics(opt_state)`",
    "with_master_weights": "`jmp_lite.with_master_params(optimizer)`",
}


def __getattr__(name: str) -> Any:
    """Returns a submodule, which is loaded now; for another name an AttributeError says what to write."""
    if name in SUBMODULES:
        return submodule(name)
    if name in LAZY:
        value = getattr(importlib.import_module(f"jmp_lite.{LAZY[name]}"), name)
        setattr(sys.modules["jmp_lite"], name, value)  # From now on Python finds it itself.
        return value
    found = [f"`jmp_lite.{module}.{name}`" for module, names in SUBMODULES.items() if name in names]
    write = OTHERWISE.get(name) or " or ".join(found)
    if write:
        raise AttributeError(f"jmp_lite has no `{name}`: write {write}")
    raise AttributeError(f"module 'jmp_lite' has no attribute '{name}'")


def submodule(name: str) -> Any:
    """Loads a submodule. One that lacks a library is an AttributeError, as `help` and `hasattr` expect."""
    try:
        return importlib.import_module(f"jmp_lite.{name}")
    except ModuleNotFoundError as error:
        raise AttributeError(f"jmp_lite.{name} does not load: {error}") from error


def __dir__() -> list[str]:
    """Returns what a person types: no types of results, no private modules."""
    names = {*vars(sys.modules["jmp_lite"]), *SUBMODULES, *LAZY} - UNLISTED - {"typing"}
    return sorted(name for name in names if name[0] != "_" or name.startswith("__"))
