"""The GPUs that the library knows: their data sheets, and their descriptions for XLA."""

import dataclasses
from collections.abc import Mapping, Sequence

PRECISIONS: tuple[str, ...] = ("float32", "tf32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Device:
    """The peak rates of a GPU, without sparsity, from NVIDIA's data sheets."""

    name: str
    flops: Mapping[str, float]  # Per second, by precision. XLA runs a missing one as another.
    bandwidth: float  # Bytes per second of the memory.
    memory: float  # In bytes.
    source: str  # Title and address of the data sheet.

    def balance(self, precision: str) -> float:
        """Returns the FLOPs per byte above which arithmetic is the limit instead of memory."""
        return self.flops[precision] / self.bandwidth


def _device(name: str, teraflops: Sequence[float], bandwidth: float, memory: float, source: str) -> Device:
    rates = {precision: 1e12 * rate for precision, rate in zip((*PRECISIONS, "float8"), teraflops)}
    return Device(name, rates, 1e9 * bandwidth, 1e9 * memory, source)


_NVIDIA = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center"
_RESOURCES = "https://resources.nvidia.com"
_IMAGES = "https://images.nvidia.com/content/technologies"

# TFLOPS in the order of `PRECISIONS` and float8, GB/s and GB. The data sheets of the L4, the H200 and the
# B200 give rates with sparsity, which are twice these. A V100 and a T4 have no TF32 and no bfloat16: XLA
# computes in float32. The GPUs before the L4 have no float8: XLA computes in float16.
DEVICES = {
    "v100": _device(
        *("V100 SXM2", (15.7, 15.7, 15.7, 125, 125), 900, 16),
        f"NVIDIA V100 Tensor Core GPU, {_IMAGES}/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf",
    ),
    "t4": _device(
        *("T4", (8.1, 8.1, 8.1, 65, 65), 300, 16),
        f"NVIDIA T4 Tensor Core GPU, {_NVIDIA}/tesla-t4/t4-tensor-core-datasheet-951643.pdf",
    ),
    "a100": _device(
        *("A100 SXM 80 GB", (19.5, 156, 312, 312, 312), 2039, 80),
        f"NVIDIA A100 Tensor Core GPU, {_NVIDIA}/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf",
    ),
    "l4": _device(
        *("L4", (30.3, 60, 121, 121, 242.5), 300, 24),
        f"NVIDIA L4 Tensor Core GPU, {_RESOURCES}/en-us-data-center-overview/l4-gpu-datasheet",
    ),
    "h100": _device(
        *("H100 SXM", (66.9, 494.7, 989.4, 989.4, 1978.9), 3352, 80),
        f"NVIDIA H100 Tensor Core GPU Architecture, {_RESOURCES}/en-us-tensor-core/gtc22-whitepaper-hopper",
    ),
    "h200": _device(
        *("H200 SXM", (66.9, 494.7, 989.4, 989.4, 1978.9), 4800, 141),
        "NVIDIA H200 Tensor Core GPU, "
        "https://nvdam.widen.net/s/nb5zzzsjdf/hpc-datasheet-sc23-h200-datasheet-3002446",
    ),
    "b200": _device(
        *("B200", (75, 1100, 2250, 2250, 4500), 7700, 180),
        "NVIDIA Blackwell, HGX B200, https://nvdam.widen.net/s/wwnsxrhm2w/blackwell-datasheet-3384703",
    ),
}


def _description(name: str, capability: str, *properties: float) -> str:
    """Returns a GPU as XLA describes it: a GpuTargetConfigProto in text form."""
    # The fields are those of
    # https://github.com/openxla/xla/blob/0774019d97e7/xla/stream_executor/device_description.proto. Those in
    # the text are the same for all of these GPUs. Where there is no driver to ask, XLA takes the version of
    # CUDA from here too: https://github.com/openxla/xla/pull/25919.
    lines = "\n".join(f"  {field}: {value}" for field, value in zip(_PROPERTIES, properties, strict=True))
    return f"""
gpu_device_info {{
  name: "{name}"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability {{ {capability} }}
{lines}
  shared_memory_per_block: 49152
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  device_address_bits: 64
  ecc_enabled: true
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.28.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 28 }}
runtime_version {{ major: 13 }}
device_description_str: "{name}"
"""


_ACCELERATED = "feature_extension: ACCELERATED_FEATURES"  # From the H100 on, such as `sm_90a`.

# The properties that XLA asks the driver for on a machine with the GPU. A V100 is not here: CUDA 13 has no
# assembler for it, so XLA cannot compile for it.
_PROPERTIES = ("core_count", "fpus_per_core", "clock_rate_ghz", "memory_bandwidth", "device_memory_size")
_PROPERTIES += ("l2_cache_size", "shared_memory_per_block_optin", "shared_memory_per_core")
_PROPERTIES += ("threads_per_core_limit",)
DESCRIPTIONS = {
    "t4": _description(
        *("Tesla T4", "major: 7 minor: 5"),
        *(40, 64, 1.59, 320064000000, 15655829504, 4194304, 65536, 65536, 1024),
    ),
    "a100": _description(
        *("NVIDIA A100-SXM4-80GB", "major: 8"),
        *(108, 64, 1.41, 2039040000000, 85100068864, 41943040, 166912, 167936, 2048),
    ),
    "l4": _description(
        *("NVIDIA L4", "major: 8 minor: 9"),
        *(58, 128, 2.04, 300096000000, 23580639232, 50331648, 101376, 102400, 1536),
    ),
    "h100": _description(
        *("NVIDIA H100 80GB HBM3", f"major: 9 {_ACCELERATED}"),
        *(132, 128, 1.98, 3352320000000, 84942979072, 52428800, 232448, 233472, 2048),
    ),
    "h200": _description(
        *("NVIDIA H200", f"major: 9 {_ACCELERATED}"),
        *(132, 128, 1.98, 4800000000000, 151397597184, 52428800, 232448, 233472, 2048),
    ),
    "b200": _description(
        *("NVIDIA B200", f"major: 10 {_ACCELERATED}"),
        *(148, 128, 1.965, 7672320000000, 191514411008, 132644864, 232448, 233472, 2048),
    ),
}
