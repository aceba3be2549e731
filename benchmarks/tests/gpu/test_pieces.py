"""The pieces: the order of the issue, commands that exist, and nothing that a rented machine cannot do."""

import re
from pathlib import Path

import pytest

from benchmarks.arms.jax_arms import CUDNN_ARMS, JAX_ARMS
from benchmarks.gpu import pieces
from benchmarks.timed import convergence, run
from examples.models import FAMILIES

FULL, SMALL = pieces.make_pieces(), pieces.make_pieces(pretend=True)
TORCH_ARMS = (*run.TORCH_ARMS, *run.FLASH_ARMS)
ROOT = Path(pieces.__file__).parents[2]


def test_the_most_valuable_pieces_come_first():
    place = {piece.name: index for index, piece in enumerate(FULL)}
    wanted = [
        *("machine", "time gpt2-small", "time resnet50", "time gpt2-small half", "time resnet50 half"),
        *("scale of the optimizer", "time gpt2-small scales"),
        *(f"time {family}" for family in pieces.OTHERS),
        *(
            "tests of the GPU",
            "time gpt2-small attention",
            "attention in bfloat16",
            "largest batch",
            "profile",
        ),
        *("converge gpt2 float16, scaled", "example digits", "float8 at width 4096", "tests of the library"),
    ]
    places = [place[name] for name in wanted]
    assert places == sorted(places)
    assert {*pieces.LEADERS, *pieces.OTHERS} == set(FAMILIES)
    assert tuple(convergence.ARMS) == pieces.CONVERGENCE_ARMS
    assert set(pieces.CONVERGENCE) < set(convergence.tasks("small"))


@pytest.mark.parametrize("made", [FULL, SMALL], ids=["full", "small"])
def test_names_are_unique_and_what_is_needed_stands_before(made):
    before = set()
    for piece in made:
        assert piece.name not in before
        assert set(piece.needs) <= before, piece.name
        assert piece.alone or piece.lane
        assert piece.seconds <= piece.limit
        before.add(piece.name)


def test_every_piece_is_rehearsed_at_a_small_size():
    for_gpus = {f"compile gpt2-small {arm}" for arm in CUDNN_ARMS}
    fewer = {f"compile {family} {arm}" for family in pieces.OTHERS for arm in (*JAX_ARMS, *TORCH_ARMS)}
    assert {piece.name for piece in FULL} - {piece.name for piece in SMALL} <= for_gpus | fewer
    assert {piece.name for piece in SMALL} <= {piece.name for piece in FULL}
    for piece in SMALL:
        assert "full" not in piece.command


def test_commands_name_modules_files_families_and_arms_that_exist():
    known = {*JAX_ARMS, *CUDNN_ARMS, *TORCH_ARMS}
    for piece in FULL:
        first, second, *rest = piece.command
        if first == "-m" and second != "pytest":
            assert (ROOT / f"{second.replace('.', '/')}.py").exists()
        elif first != "-m":
            assert (ROOT / first).exists()
        if second == "benchmarks.gpu.compile_arm":
            assert rest[0] in FAMILIES
            assert rest[1] in known
        if "--arms" in rest and second == "benchmarks.timed.run":
            assert set(rest[rest.index("--arms") + 1 :]) <= known
            assert "float16" in rest  # The reference of the ratios.


def test_a_piece_says_which_package_its_arm_needs():
    found = {piece.name: piece.packages for piece in FULL}
    assert found["compile gpt2-small torch float16"] == ("torch",)
    assert found["compile gpt2-small float16 jmp"] == ("jmp",)
    assert found["compile gpt2-small float16"] == ()
    assert found["example language_model"] == found["example autocast"] == ("tensorboardX",)
    assert found["example digits"] == ()


def test_the_wheels_to_carry_are_pinned_and_their_command_is_there():
    text = (ROOT / "benchmarks" / "gpu" / "wheels.txt").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w-]+==[\w.]+", line) for line in lines)
    assert {"jmp", "dm-haiku", "keras", "scikit-image"} <= {line.split("==")[0] for line in lines}
    assert "pip download" in text
