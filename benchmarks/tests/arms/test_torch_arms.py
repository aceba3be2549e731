"""The arms of PyTorch: each is what it claims, starts at the start, learns, and recovers from an overflow."""

import collections
import dataclasses
import functools
import importlib.util

import jax
import pytest

if importlib.util.find_spec("torch") is None:
    pytest.skip('needs pip install -e ".[torch]"', allow_module_level=True)

import torch

from benchmarks.arms import torch_arms
from benchmarks.arms.torch_arms import TORCH_ARMS, TorchArm
from benchmarks.timed import run
from examples.models import FAMILIES
from examples.models.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread")
HALF = ("torch bfloat16", "torch float16")
MATCHED = [name for name in TORCH_ARMS if "flash" not in name]
CASES = [("gpt2-small", name) for name in TORCH_ARMS] + [("resnet50", name) for name in MATCHED]
CASES.sort(key=lambda case: case[1] != "torch float16")  # First, as CI runs the first two.


@dataclasses.dataclass(frozen=True)
class Initialized(Workload):
    """A workload that has been initialized, which takes XLA longer than all else here."""

    variables: dict

    def init(self, seed):
        assert seed == 0
        return dict(self.variables)


@functools.cache
def workload(family):
    small = FAMILIES[family].small()
    inputs, _ = small.batch(0, 1)
    variables = jax.jit(small.model.init)(jax.random.key(0), *inputs)
    fields = {field.name: getattr(small, field.name) for field in dataclasses.fields(small)}
    return Initialized(**fields, variables=variables)


def make(family, name, batch_size=16):
    return TorchArm(name, workload(family), batch_size, quick=True, device="cpu")


def assert_at_the_start(arm):
    state = arm.module.state_dict()
    assert state.keys() == arm.initial.keys()
    for name, x in state.items():
        torch.testing.assert_close(x, arm.initial[name], rtol=0, atol=0)
    assert all(x.grad is None for x in arm.module.parameters())
    assert not arm.optimizer.state


@pytest.mark.cases(fast=2, slow=0)
@pytest.mark.parametrize(("family", "name"), CASES)
def test_an_arm_is_what_it_claims_and_learns_from_the_start(family, name):
    arm = make(family, name)
    facts = arm.compile()
    assert_at_the_start(arm)
    dtype = str(arm.precision.dtype).removeprefix("torch.")
    assert facts["kernels"] is None
    assert facts["products"] == facts["operands"]
    assert all(product.endswith(f" {dtype}") for product in facts["products"])
    assert any("flash" in product for product in facts["products"]) == ("flash" in name)
    with torch.no_grad():
        start = float(arm.forward(*arm.batch))
    arm.restart()  # The statistics of batch normalization have moved.
    assert arm.steps(1) == pytest.approx(start, rel=4 * float(torch.finfo(arm.precision.dtype).eps))
    assert arm.steps(29) < 0.7 * start
    assert {x.dtype for x in arm.module.parameters()} == {torch.float32}
    assert arm.peak_bytes() is None


def test_the_products_of_a_gpt2_are_all_seen():
    arm = make("gpt2-small", "torch float16", batch_size=2)
    products = collections.Counter()
    for (name, dtypes), count in arm.operands().items():
        assert dtypes == ("float16",)
        products[name] += count
    # Forward: four Dense a block and two products of attention, and the head; each has two backward.
    assert products.total() == 3 * (2 * (4 + 2) + 1)
    assert_at_the_start(arm)


@pytest.mark.cases(fast=3, slow=0)
@pytest.mark.parametrize("family", ["bert-base", "seq2seq", "neumf", "unet", "ssd", "waveglow"])
def test_autocast_takes_every_product_of_a_family_to_half(family):
    for name in HALF:
        arm = make(family, name, batch_size=2)
        torch_arms.check_operands(arm.operands(), arm.precision)


def test_a_recurrent_layer_counts_as_a_product():
    found = make("seq2seq", "torch bfloat16", batch_size=2).operands()
    recurrent = {name for name, _ in found if "rnn" in name}
    products = sum(count for (name, _), count in found.items())
    # Eight LSTMs: by oneDNN, or, where it has no half, by two products for each of 15 steps or more.
    assert recurrent or products > 8 * 15


# An arm that is not what it claims.


class WithoutAutocast(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        with torch.autocast(x.device.type, enabled=False):
            return self.layer(x.float())


class Rounded(WithoutAutocast):
    def forward(self, x):
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.layer(x).float()


@pytest.mark.parametrize(
    ("name", "layer", "message"),
    [
        ("torch float16", WithoutAutocast, "claimed float16: addmm takes float32"),
        ("torch float32", Rounded, "claimed float32: addmm takes bfloat16"),
    ],
)
def test_one_product_of_another_dtype_is_found(name, layer, message):
    arm = make("gpt2-small", name, batch_size=2)
    arm.module.blocks[1].expand = layer(arm.module.blocks[1].expand)
    arm.initial = arm.module.state_dict()
    with pytest.raises(AssertionError, match=message):
        arm.compile()


@pytest.mark.parametrize(("name", "flag"), [("torch TF32", False), ("torch float32", True)])
def test_the_flags_of_tf32_are_held_to_the_claim(name, flag, monkeypatch):
    arm = make("gpt2-small", name, batch_size=2)
    torch_arms.check_flags(arm.precision)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", flag)
    with pytest.raises(AssertionError, match="TF32 flags"):
        arm.compile()


def test_attention_that_is_not_multiplied_out_in_half_is_found():
    arm = make("gpt2-small", "torch float16", batch_size=2)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(False)  # PyTorch's default; the next arm sets it.
    with pytest.raises(AssertionError, match="claimed float16: bmm takes float32"):
        arm.compile()


def test_kernels_tell_whether_attention_is_fused():
    # Names as an H100 has them.
    plain = collections.Counter({"nvjet_tst_128x256_64x4_2x1_v_bz_NNT": 4, "triton_poi_fused_add_0": 9})
    fused = plain + collections.Counter({"flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>": 2})
    named = plain + collections.Counter({"triton_poi_fused__scaled_dot_product_flash_attention_1": 2})
    by_cudnn = plain + collections.Counter({"cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16": 2})
    matched, flash = (torch_arms.PRECISIONS[name] for name in ("torch float16", "torch float16, flash"))
    for kernels in (plain, named):
        torch_arms.check_attention(kernels, matched)
        with pytest.raises(AssertionError, match="fused attention"):
            torch_arms.check_attention(kernels, flash)
    for kernels in (fused, by_cudnn):
        torch_arms.check_attention(kernels, flash)
        with pytest.raises(AssertionError, match="fused attention"):
            torch_arms.check_attention(kernels, matched)


def test_kernels_of_products_are_counted_by_name():
    names = ["nvjet_hsh_64x8", "sm90_xmma_fprop_implicit_gemm_f16", "void cutlass::Kernel2<wgrad>"]
    others = ["triton_poi_fused_convolution_2", "void at::native::convert_kernel", "vectorized_elementwise"]
    kernels = collections.Counter({name: index + 1 for index, name in enumerate(names + others)})
    assert torch_arms.product_kernels(kernels) == dict(zip(names, (1, 2, 3)))


def test_an_unknown_arm_is_refused():
    with pytest.raises(ValueError, match="unknown arm 'float16'"):
        make("gpt2-small", "float16")


def test_fused_attention_is_for_models_that_have_it():
    with pytest.raises(ValueError, match="not for ResNet"):
        make("resnet50", "torch float16, flash")


# The loss scale.


def test_an_overflow_halves_the_scale_until_a_step_is_taken():
    arm = make("gpt2-small", "torch float16", batch_size=2)
    arm.compile()
    scales = arm.overflow(2.0**40, 60)
    assert scales is not None
    *halved, taken = scales
    assert halved == [2.0 ** (40 - skipped) for skipped in range(len(halved))]
    assert taken == halved[-1] < 2.0**30
    steps = {float(state["step"]) for state in arm.optimizer.state.values()}
    assert steps == {1.0}  # All others were skipped.
    moved = [not torch.equal(x, arm.initial[name]) for name, x in arm.module.state_dict().items()]
    assert all(moved)


def test_an_overflow_gives_up_at_the_limit():
    arm = make("gpt2-small", "torch float16", batch_size=2)
    arm.compile()
    assert arm.overflow(2.0**40, 3) == [2.0**40, 2.0**39, 2.0**38, 2.0**37]
    for name, x in arm.module.named_parameters():
        torch.testing.assert_close(x.detach(), arm.initial[name], rtol=0, atol=0)


def test_an_arm_without_a_scale_has_no_overflow():
    arm = make("gpt2-small", "torch bfloat16", batch_size=2)
    assert arm.overflow(2.0**40, 60) is None


def test_the_driver_knows_the_arms():
    assert {*run.TORCH_ARMS, *run.FLASH_ARMS} == set(TORCH_ARMS)
