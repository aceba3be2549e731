"""The README's Python blocks run, in order, in one namespace."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_python_blocks_of_the_readme_run():
    assert len(BLOCKS) >= 6
    namespace = {}
    for block in BLOCKS:
        exec(compile(block, str(README), "exec"), namespace)
    assert namespace["loss"].dtype == "float32"
    assert namespace["loss_scale"].loss_scale in (2.0**14, 2.0**15)
