"""The pieces of the queue, the most valuable first.

The estimates are for an H100 with 16 cores. A piece that is done leaves its real seconds in the results. This
file imports neither JAX nor a model: the time of the command begins when it starts.
"""

import dataclasses
import os
from collections.abc import Iterator, Sequence

from benchmarks.gpu.queue import Piece

MODULE = "-m"
FIRST = ("float16", "float32", "TF32", "float16 autocast", "torch float16", "torch TF32")
MORE = ("float16", "bfloat16", "float16 unchecked")
SCALES = ("float16", "float16 unchecked", "float16 jmp", "float16 Flax DynamicScale")
ATTENTION = (
    "float16",
    "float16, cuDNN attention",
    "float16 autocast, cuDNN attention",
    "torch float16, flash",
)
PROGRAMS = ("float32", "TF32", "float16", "float16 autocast")
LEADERS = ("gpt2-small", "resnet50")
OTHERS = ("bert-base", "seq2seq", "unet", "ssd", "neumf", "waveglow", "gpt2-medium")
# Families and arms of `benchmarks.timed.convergence`.
CONVERGENCE = ("gpt2", "unet")
CONVERGENCE_ARMS = ("float32", "bfloat16", "float16, scaled", "float16, unscaled")
WIDTHS = (4096, 2048, 1024, 8192)  # Of the block in float8: the width that decides first.
HALVES = ("bfloat16", "float16")
EXAMPLES = ("language_model", "autocast", "digits")
# XLA times kernels while it compiles. More than two compilations at once would disturb each other's times.
SLOTS: dict[str, int] = dict.fromkeys(
    ("jax", "torch", "pretended"), 2 if len(os.sched_getaffinity(0)) >= 12 else 1
)


def make_pieces(pretend: bool = False) -> list[Piece]:
    """Returns the pieces.

    Args:
        pretend: whether every piece is made small, for a CPU.
    """
    if not pretend:
        return list(Pieces().all())
    # Two cores take longer than sixteen and a GPU, also for small sizes.
    return [dataclasses.replace(piece, limit=2 * piece.limit) for piece in _PretendedPieces().all()]


class Pieces:
    """The pieces at full size."""

    size = "full"

    def all(self) -> Iterator[Piece]:
        """Yields the pieces in order, each one once."""
        made: set[str] = set()
        for piece in self._ordered():
            if piece.name not in made:
                made.add(piece.name)
                yield piece

    def _ordered(self) -> Iterator[Piece]:
        yield self.machine()
        for family in LEADERS:
            yield from self.family(family, FIRST)
        for family in LEADERS:
            yield from self.family(family, MORE, "half")
        yield self.scale_time()
        yield from self.family("gpt2-small", SCALES, "scales")
        for family in OTHERS:
            yield from self.family(family, self.arms(FIRST))
        for family in OTHERS:
            yield from self.family(family, self.arms(MORE), "half")
        yield self.gpu_tests()
        yield from self.family("gpt2-small", self.attention_arms(), "attention")
        yield from map(self.attention_time, HALVES)
        yield self.largest_batch()
        yield self.profile()
        for family in CONVERGENCE:
            yield from (self.convergence(family, arm) for arm in CONVERGENCE_ARMS)
        yield from map(self.example, EXAMPLES)
        yield from map(self.float8_time, WIDTHS)
        pretended = [self.pretended(family) for family in (*LEADERS, *OTHERS)]
        yield from pretended
        yield self.library(tuple(piece.name for piece in pretended))

    def machine(self) -> Piece:
        """Reports the machine. Without it nothing is run."""
        command = (MODULE, "benchmarks.gpu.machine", "--json", "{work}/machine.json", *self.small("machine"))
        return Piece("machine", command, 5, 60, writes=("machine.json",), gate=True)

    def family(self, family: str, arms: Sequence[str], part: str = "") -> Iterator[Piece]:
        """Compiles arms of a model beside each other, then times them in turn."""
        compiled = [self.compiled(family, arm) for arm in arms]
        yield from compiled
        command = (MODULE, "benchmarks.timed.run", family, "--add", "--missing", "--minutes", "4")
        command += (
            "--results",
            "{work}/results",
            "--logs",
            "{work}/logs",
            "--arms",
            *arms,
            *self.small("run"),
        )
        name = " ".join(("time", family, part)).strip()
        needs = tuple(piece.name for piece in compiled)
        yield Piece(name, command, 60, 300, needs=needs, writes=(f"results/*/{family}.json",))

    def compiled(self, family: str, arm: str) -> Piece:
        """Compiles an arm, and so fills the caches."""
        path = f"compiled/{family}/{arm.replace(' ', '_').replace(',', '')}.json"
        command = (MODULE, "benchmarks.gpu.compile_arm", family, arm, "--size", self.size)
        return Piece(
            f"compile {family} {arm}",
            (*command, "--json", f"{{work}}/{path}"),
            30,
            240,
            alone=False,
            lane="torch" if arm.startswith("torch ") else "jax",
            packages=self.packages(arm),
            writes=(path,),
        )

    def packages(self, arm: str) -> tuple[str, ...]:
        """Returns what an arm needs beside JAX and Flax."""
        return ("torch",) if arm.startswith("torch ") else ("jmp",) if arm.endswith(" jmp") else ()

    def scale_time(self) -> Piece:
        """Times AdamW on 124 leaves with each loss scale."""
        command = (MODULE, "benchmarks.gpu.scale_time", "--json", "{work}/scale_time.json")
        return Piece(
            "scale of the optimizer",
            (*command, *self.small("scale_time")),
            30,
            150,
            writes=("scale_time.json",),
        )

    def gpu_tests(self) -> Piece:
        """Runs the tests that need a GPU."""
        command = (MODULE, "pytest", "-q", "-m", "gpu", "-n", "4", "benchmarks/tests/test_gpu.py")
        return Piece("tests of the GPU", command, 120, 400, packages=("pytest", "xdist", "hypothesis"))

    def arms(self, arms: Sequence[str]) -> Sequence[str]:
        """Returns the arms of a model that is not one of the leaders."""
        return arms

    def attention_arms(self) -> Sequence[str]:
        """Returns the arms with cuDNN's attention and with PyTorch's flash attention."""
        return ATTENTION

    def largest_batch(self) -> Piece:
        """Looks for the largest batch of GPT-2, and runs it."""
        command = (MODULE, "benchmarks.compiled.largest_batch", "--arms", "float32", "float16")
        command += ("--results", "{work}/results", *self.small("largest_batch"))
        return Piece("largest batch", command, 150, 400, writes=("results/*/largest-batch-*.json",))

    def pretended(self, family: str) -> Piece:
        """Compiles arms for an H100 that is not there, to compare them with the real programs."""
        command = (MODULE, "benchmarks.compiled.predict", family, "--only-pretended", "--size", self.size)
        return Piece(
            f"pretended {family}",
            (*command, "--results", "{work}/results", "--arms", *self.programs()),
            60,
            400,
            alone=False,
            lane="pretended",
            packages=("jax_cuda13_plugin",),
            writes=(f"results/h100-pretended/{family}.json",),
        )

    def programs(self) -> Sequence[str]:
        """Returns the arms whose real programs are compared with those for an H100 that is not there."""
        return PROGRAMS

    def profile(self) -> Piece:
        """Profiles a step of GPT-2."""
        command = (MODULE, "benchmarks.gpu.profile_arm", "gpt2-small", "float16", "--size", self.size)
        return Piece(
            "profile", (*command, "--json", "{work}/profile.json"), 40, 150, writes=("profile.json",)
        )

    def convergence(self, family: str, arm: str) -> Piece:
        """Trains one arm of a model from three seeds."""
        path = f"convergence/{family}.json"
        command = (MODULE, "benchmarks.timed.convergence", "--size", "large", "--families", family)
        command += ("--arms", arm, "--json", f"{{work}}/{path}", "--output", "{work}/convergence.png")
        name = f"converge {family} {arm}"
        return Piece(name, (*command, *self.small("convergence")), 90, 400, writes=(path,))

    def example(self, name: str) -> Piece:
        """Runs an example at the large size."""
        output = ("--output", "{work}/digits.png") if name == "digits" else ()
        command = (f"examples/{name}.py", "--size", "large", *output)
        packages = () if name == "digits" else ("tensorboardX",)  # The autocast example imports the other.
        return Piece(f"example {name}", (*command, *self.small(name)), 90, 300, packages=packages)

    def float8_time(self, width: int) -> Piece:
        """Times one block of a transformer under autocast to float8."""
        path = f"float8-{width}.json"
        command = (MODULE, "benchmarks.gpu.float8_time", "--width", str(width), "--json", f"{{work}}/{path}")
        name = f"float8 at width {width}"
        return Piece(name, (*command, *self.small("float8_time")), 45, 200, writes=(path,))

    def attention_time(self, dtype: str) -> Piece:
        """Compares the numbers of `fuse_attention` with those of float32, and times it."""
        path = f"attention-{dtype}.json"
        command = (MODULE, "benchmarks.gpu.attention_time", "--dtype", dtype, "--json", f"{{work}}/{path}")
        command = (*command, *self.small("attention_time"))
        return Piece(f"attention in {dtype}", command, 60, 240, writes=(path,))

    def library(self, needs: tuple[str, ...]) -> Piece:
        """Runs the library's tests in the time that is left, after the pieces that compile beside others."""
        command = (MODULE, "pytest", "-q", "-n", "14", "tests")
        packages = ("pytest", "xdist", "hypothesis")
        return Piece("tests of the library", command, 30, 900, needs=needs, packages=packages)

    def small(self, what: str) -> tuple[str, ...]:
        """Returns further arguments that make a piece small; none here."""
        del what
        return ()


class _PretendedPieces(Pieces):
    """The same pieces at sizes for a CPU."""

    size = "small"
    _small = {  # noqa: RUF012
        "machine": ("--size", "256"),
        "run": ("--quick",),
        "scale_time": ("--width", "8", "--steps", "2", "--blocks", "2"),
        "largest_batch": ("neumf", "--size", "small", "--step", "8192", "--memory", "1e8"),
        "convergence": ("--steps", "1", "--seeds", "1", "--size", "small"),
        "language_model": ("--size", "small", "--steps", "2"),
        "autocast": ("--size", "small", "--steps", "2"),
        "digits": ("--size", "small", "--epochs", "1", "--seeds", "1"),
        "attention_time": ("--batch", "2", "--length", "64", "--heads", "2", "--steps", "2", "--blocks", "2"),
        "float8_time": ("--width", "64", "--tokens", "128", "--steps", "2", "--blocks", "2", "--all"),
    }

    def small(self, what: str) -> tuple[str, ...]:
        return self._small[what]

    def arms(self, arms: Sequence[str]) -> Sequence[str]:
        # On a CPU float16 of PyTorch is so slow that its steps would be most of the rehearsal.
        return [arm for arm in arms if arm in ("float16", "float32", "bfloat16", "torch TF32")]

    def attention_arms(self) -> Sequence[str]:
        return [arm for arm in ATTENTION if "cuDNN" not in arm]  # cuDNN is for GPUs.

    def programs(self) -> Sequence[str]:
        return ("float16",)

    def library(self, needs: tuple[str, ...]) -> Piece:
        command = (MODULE, "pytest", "-q", "-n", "1", "tests/core/test_paths.py")
        packages = ("pytest", "xdist", "hypothesis")
        return Piece("tests of the library", command, 10, 300, needs=needs, packages=packages)

    def attention_time(self, dtype: str) -> Piece:
        piece = super().attention_time(dtype)  # JAX has no attention in float16 on a CPU.
        command = tuple("bfloat16" if each == "float16" else each for each in piece.command)
        return dataclasses.replace(piece, command=command)

    def gpu_tests(self) -> Piece:
        command = (MODULE, "pytest", "-q", "-m", "gpu", "-n", "1", "benchmarks/tests/test_gpu.py")
        return Piece("tests of the GPU", command, 10, 300, packages=("pytest", "xdist", "hypothesis"))
