"""The examples of `compile_for` and `mesh_for`, which need the extra `[h100]`, run as the page shows them."""

import importlib.util
import re
import textwrap

import pytest

from benchmarks.device import HAS_GPU
from jmp_lite import diagnostics

if importlib.util.find_spec("jax_cuda13_plugin") is None:
    pytest.skip('needs pip install -e ".[h100]"', allow_module_level=True)

pytestmark = pytest.mark.skipif(HAS_GPU, reason="compile_for is for a machine without a GPU")

BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("name", ["compile_for", "mesh_for"])
def test_the_example_runs(name, request, capsys):
    page = (request.config.rootpath / "docs/api/diagnostics.md").read_text()
    (imports, *_), (example,) = (BLOCK.findall(text) for text in (page, getattr(diagnostics, name).__doc__))
    exec(compile(imports + textwrap.dedent(example), name, "exec"), {})
    assert name == "mesh_for" or "float16 is at best" in capsys.readouterr().out
