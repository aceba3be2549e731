"""The examples of the pages that need the extra `[h100]` run as the pages show them."""

import importlib.util
import re
import textwrap

import pytest

from benchmarks.device import HAS_GPU
from jmp_lite import programs, testing

if importlib.util.find_spec("jax_cuda13_plugin") is None:
    pytest.skip('needs pip install -e ".[h100]"', allow_module_level=True)

pytestmark = pytest.mark.skipif(HAS_GPU, reason="compile_for is for a machine without a GPU")

BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("name", ["compile_for", "mesh_for"])
def test_the_example_runs(name, request, capsys):
    page = (request.config.rootpath / "docs/api/programs.md").read_text()
    (imports, *_), (example,) = (BLOCK.findall(text) for text in (page, getattr(programs, name).__doc__))
    exec(compile(imports + textwrap.dedent(example), name, "exec"), {})
    assert name == "mesh_for" or "float16 is at best" in capsys.readouterr().out


def test_the_example_of_assert_tensor_cores_passes(request):
    imports, *_ = BLOCK.findall((request.config.rootpath / "docs/api/testing.md").read_text())
    (example,) = BLOCK.findall(testing.assert_tensor_cores.__doc__)
    exec(compile(imports + textwrap.dedent(example), "testing", "exec"), {})


def test_the_test_of_the_testing_page_fails_as_the_page_shows(request):
    page, namespace = (request.config.rootpath / "docs/testing.md").read_text(), {}
    for block in BLOCK.findall(page):
        exec(compile(block, "testing.md", "exec"), namespace)
    with pytest.raises(AssertionError) as error:
        namespace["test_the_step_runs_on_tensor_cores"]()
    assert f"```text\n{error.value}\n```" in page
