"""The pictures of the documentation show what the code is now."""

import re

import pytest
from PIL import Image

from benchmarks.compiled import pictures


def texts(path):
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text())


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_of_the_documentation_is_the_one_that_is_drawn_now(name, tmp_path):
    pictures.PICTURES[name](tmp_path / name)
    assert texts(tmp_path / name) == texts(pictures.ROOT / "docs" / name)


def test_the_plan_shows_the_products_in_half_and_the_sums_in_float32(tmp_path):
    pictures.draw_plan(tmp_path / "plan.svg")
    found = texts(tmp_path / "plan.svg")
    assert found.count("dot_general") == 3
    assert "reduce_sum is on the deny list" in found


def test_the_rooms_are_those_of_the_package():
    package = pictures.ROOT / "jmp_lite"
    there = {each.name + "/" * each.is_dir() for each in package.iterdir() if not each.name.startswith("__")}
    shown = {room for floor in pictures.FLOORS for room in floor}
    assert there - {"_version.py", "py.typed"} == shown
    assert pictures.imported_rooms("_policy.py") == {"_dtypes.py", "_paths.py", "_text.py", "_tree.py"}


def test_the_dark_plot_of_the_readme_is_made_from_the_light_one():
    light = pictures.ROOT / "docs" / "digits.png"
    made = pictures.darkened(light)
    with Image.open(light.with_name("digits_dark.png")) as dark:
        assert dark.tobytes() == made.tobytes()
    assert made.getpixel((0, 0))[3] == 0  # The white background is transparent.
