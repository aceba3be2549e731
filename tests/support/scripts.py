"""Loads an example as a script: it imports `examples.models` as `models`."""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def load_script(name):
    """The module examples/NAME.py."""
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for inner in ("", ".resnet", ".training", ".workload"):
            patch.setitem(sys.modules, f"models{inner}", importlib.import_module(f"examples.models{inner}"))
        patch.setitem(sys.modules, spec.name, module)  # Dataclasses look themselves up.
        spec.loader.exec_module(module)
    return module
