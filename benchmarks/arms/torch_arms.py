"""The arms in PyTorch: what its users write for the best speed, in several precisions.

Parameters are float32 in every arm; autocast casts to half precision. The loss is compiled, forward and
backward. The optimizer is PyTorch's fused one. cuDNN chooses its convolutions by timing them.
"""

import collections
import contextlib
import dataclasses
import re
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.arms.torch_models import make_optimizer, tensors, twin
from examples.models.workload import Workload

SCALE = 2.0**16  # GradScaler's default.
FUSED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]  # The faster one on an H100 first.


@dataclasses.dataclass(frozen=True)
class Precision:
    """The precision that an arm claims.

    Attributes:
        dtype: of the operands of products.
        tf32: whether float32 products round their operands to TF32.
        flash: whether attention is fused, and not written out as in `examples.models.attention`.
    """

    dtype: torch.dtype
    tf32: bool = False
    flash: bool = False


PRECISIONS = {
    "torch float32": Precision(torch.float32),
    "torch TF32": Precision(torch.float32, tf32=True),
    "torch bfloat16": Precision(torch.bfloat16),
    "torch float16": Precision(torch.float16),
    "torch bfloat16, flash": Precision(torch.bfloat16, flash=True),
    "torch float16, flash": Precision(torch.float16, flash=True),
}
TORCH_ARMS: tuple[str, ...] = tuple(PRECISIONS)


class TorchArm:
    """A training step of one arm. Settings are those of the process: use only its newest arm.

    Args:
        name: one of `TORCH_ARMS`.
        workload: the model and its training.
        batch_size: the number of examples in a step.
        quick: whether the step is traced and not compiled to machine code.
        device: `cuda` or `cpu`; None for a GPU if there is one.

    Raises:
        ValueError: the arm is unknown, or it has fused attention and the model has no attention.
    """

    def __init__(
        self, name: str, workload: Workload, batch_size: int, quick: bool, device: str | None = None
    ):
        if name not in PRECISIONS:
            raise ValueError(f"unknown arm {name!r}, it must be one of {TORCH_ARMS}")
        self.precision, self.settings, self.quick = PRECISIONS[name], workload.optimizer, quick
        if self.precision.flash and not hasattr(workload.model, "attention"):
            raise ValueError(f"{name!r} is for models of attention, not for {type(workload.model).__name__}")
        set_flags(self.precision)
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        module, self.loss = twin(workload, workload.init(0))
        channels_last = torch.channels_last
        self.module: Any = module.to(self.device, memory_format=channels_last)  # type: ignore[call-overload]
        self.batch = tensors(workload.batch(0, batch_size), self.device)
        # On the host: on the device these would count as memory of the training.
        self.initial = {name: x.cpu().clone() for name, x in self.module.state_dict().items()}
        self.run: Any = None
        self.restart()

    def restart(self, scale: float = SCALE) -> None:
        """Restores the initial parameters, with a new optimizer state and an initial loss scale."""
        self.module.load_state_dict(self.initial)
        self.module.zero_grad(set_to_none=True)
        self.optimizer = make_optimizer(self.settings, self.module)
        scaled = self.precision.dtype == torch.float16
        self.scaler = torch.amp.GradScaler(self.device, init_scale=scale, enabled=scaled)

    @contextlib.contextmanager
    def in_precision(self) -> Iterator[None]:
        """Sets autocast and the kind of attention, for a forward pass."""
        with contextlib.ExitStack() as stack:
            if self.precision.dtype != torch.float32:
                stack.enter_context(torch.autocast(self.device, self.precision.dtype))
            if not self.precision.flash:
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            elif self.device == "cuda":
                stack.enter_context(sdpa_kernel(FUSED, set_priority=True))
            yield

    def forward(self, inputs: Any, targets: Any) -> torch.Tensor:
        """Returns the loss. This is the function that is compiled."""
        return self.loss(self.module(*inputs), targets)

    def step(self, forward: Any) -> torch.Tensor:
        """Takes a training step and returns the loss before it, without waiting."""
        with self.in_precision():
            loss = forward(*self.batch)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def compile(self) -> dict[str, Any]:
        """Checks the precision, compiles the step and restores the initial state.

        Returns:
            `compile_seconds`; `operands`, the number of products of PyTorch by name and operand dtypes;
            `products`, the number of the GPU's kernels for them (on a CPU the same as `operands`); and
            `kernels`, the number of kernels of a step (on a CPU None).

        Raises:
            AssertionError: a product takes another dtype than claimed, or attention is another kind.
        """
        torch.compiler.reset()
        operands = self.operands()
        check_flags(self.precision)
        check_operands(operands, self.precision)
        began = time.perf_counter()
        self.run = torch.compile(
            self.forward, dynamic=False, backend="aot_eager" if self.quick else "inductor"
        )
        self.steps(1)
        seconds = time.perf_counter() - began
        named = {f"{name} {' '.join(dtypes)}": count for (name, dtypes), count in operands.items()}
        facts = {"compile_seconds": round(seconds, 1), "kernels": None, "products": named, "operands": named}
        facts |= {"device": "cpu", "program_bytes": None}
        if self.device == "cuda":
            kernels = self.kernels()
            check_attention(kernels, self.precision)
            facts |= {"kernels": kernels.total(), "products": product_kernels(kernels)}
            # This peak includes the step that was not compiled. It is reset below.
            facts |= {"device": torch.cuda.get_device_name(), "program_bytes": self.peak_bytes()}
        self.restart()
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return facts

    def operands(self) -> collections.Counter[tuple[str, tuple[str, ...]]]:
        """Counts the products of a step that is not compiled, and restores the initial state."""
        with OperandRecorder() as recorder:
            self.step(self.forward)
        self.restart()
        return recorder.found

    def kernels(self) -> collections.Counter[str]:
        """Takes a step and returns the names of the kernels that the GPU ran."""
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            self.steps(1)
        return collections.Counter(
            event.name
            for event in profile.events() or ()
            if event.device_type == torch.autograd.DeviceType.CUDA
            and not event.is_user_annotation
            and not re.match("Memcpy|Memset", event.name)
        )

    def steps(self, count: int) -> float:
        """Takes `count` steps, waits for the last one and returns its loss."""
        assert self.run is not None, "compile first"
        for _ in range(count):
            loss = self.step(self.run)
        if self.device == "cuda":
            torch.cuda.synchronize()
        return loss.item()  # type: ignore[possibly-unbound]

    def peak_bytes(self) -> int | None:
        """Returns the peak of the memory in use since the step was compiled, in bytes; None on a CPU."""
        return torch.cuda.max_memory_allocated() if self.device == "cuda" else None

    def overflow(self, scale: float, limit: int) -> list[float] | None:
        """Starts again with a scale that overflows, and takes steps until one is not skipped.

        Args:
            scale: the initial scale.
            limit: the largest number of steps.

        Returns:
            The scale before the first step and after each; None if the arm has no scale.
        """
        if not self.scaler.is_enabled():
            return None
        self.restart(scale)
        scales = [self.scaler.get_scale()]
        while len(scales) <= limit and (len(scales) < 2 or scales[-1] < scales[-2]):
            self.steps(1)
            scales.append(self.scaler.get_scale())
        return scales


def set_flags(precision: Precision) -> None:
    """Sets the flags that PyTorch has for the whole process."""
    with warnings.catch_warnings():
        # PyTorch 2.9 asks for `fp32_precision` instead. It then refuses to read these flags, but its
        # own compiler reads them. Setting these flags sets both.
        warnings.filterwarnings("ignore", "Please use the new API settings to control TF32", UserWarning)
        torch.backends.cuda.matmul.allow_tf32 = precision.tf32
        torch.backends.cudnn.allow_tf32 = precision.tf32
    torch.backends.cudnn.benchmark = True
    # Without this, attention that is not fused multiplies in float32, even under autocast.
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)


# The operand dtypes of products, as PyTorch's operations get them from autocast.

_PRODUCTS = re.compile(
    r"mm|addmm|bmm|baddbmm|addbmm|mv|addmv|dot|vdot|(mkldnn_|cudnn_)?convolution(_backward)?"
    r"|_scaled_dot_product_\w+|_cudnn_rnn(_backward)?|mkldnn_rnn_layer(_backward)?"
)
_NOT_MULTIPLIED = {"logsumexp"}  # Statistics of the softmax, for the backward pass of attention.


class OperandRecorder(TorchDispatchMode):
    """Counts products, forward and backward, by the dtypes of their operands.

    Attributes:
        found: the number of products, by name and dtypes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: collections.Counter[tuple[str, tuple[str, ...]]] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if _PRODUCTS.fullmatch(name):
            names = [argument.name for argument in func._schema.arguments]
            given = {**dict(zip(names, args)), **kwargs}
            values = [value for key, value in given.items() if key not in _NOT_MULTIPLIED]
            operands = (x for value in values for x in (value if isinstance(value, list) else [value]))
            floating = (x for x in operands if isinstance(x, torch.Tensor) and x.is_floating_point())
            self.found[name, tuple(sorted({str(x.dtype).removeprefix("torch.") for x in floating}))] += 1
        return func(*args, **kwargs)


def check_flags(precision: Precision) -> None:
    """Raises AssertionError if the flags of TF32 are not as claimed."""
    flags = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    assert flags == (precision.tf32, precision.tf32), f"claimed {precision}: TF32 flags {flags}"


def check_operands(operands: collections.Counter[Any], precision: Precision) -> None:
    """Raises AssertionError if a product takes another dtype than claimed."""
    claimed = str(precision.dtype).removeprefix("torch.")
    assert operands, "the step has no products"
    for name, dtypes in operands:
        assert dtypes == (claimed,), f"claimed {claimed}: {name} takes {', '.join(dtypes)}"


# The kernels that the GPU ran.

_PRODUCT_KERNEL = re.compile(
    r"gemm|gemv|cutlass|xmma|nvjet|conv(?!ert)|wgrad|dgrad|fprop|split_?k|lstm|rnn|flash|fmha|sdpa|triton_tem",
    re.IGNORECASE,
)
_ATTENTION_KERNEL = re.compile("flash|fmha|sdpa", re.IGNORECASE)


def product_kernels(
    kernels: collections.Counter[str], pattern: re.Pattern[str] = _PRODUCT_KERNEL
) -> dict[str, int]:
    """Counts the kernels that multiply, by the start of their names, without kernels that Triton fused."""
    found: collections.Counter[str] = collections.Counter()
    for name, count in kernels.items():
        if pattern.search(name) and not re.match("triton_(?!tem)", name):
            found[name[:120]] += count
    return dict(found)


def check_attention(kernels: collections.Counter[str], precision: Precision) -> None:
    """Raises AssertionError if attention is fused and the arm claims that it is not, or the reverse."""
    fused = product_kernels(kernels, _ATTENTION_KERNEL)
    assert bool(fused) == precision.flash, f"claimed {precision}: kernels of fused attention {fused}"
