"""The models of NVIDIA's table of mixed precision results, as users write them: float32, without a cast.

This is the only zoo of models: the examples, the benchmarks and the tests use it. Read `workload` first, then
any model, then `training`.
"""

import dataclasses
import functools
from collections.abc import Callable

from . import bert, gpt2, neumf, resnet, seq2seq, ssd, unet, waveglow
from .workload import Workload


@dataclasses.dataclass(frozen=True)
class Family:
    """A model in two sizes.

    Attributes:
        full: as published, on random data: for a GPU.
        small: for a CPU, on real data.
    """

    full: Callable[[], Workload]
    small: Callable[[], Workload]


FAMILIES = {
    "resnet50": Family(resnet.full, resnet.small),
    "bert-base": Family(bert.full, bert.small),
    "gpt2-small": Family(gpt2.full, gpt2.small),
    "gpt2-medium": Family(functools.partial(gpt2.full, width=1024, layers=24, batch_size=4), gpt2.small),
    "seq2seq": Family(seq2seq.full, seq2seq.small),
    "neumf": Family(neumf.full, neumf.small),
    "unet": Family(unet.full, unet.small),
    "ssd": Family(ssd.full, ssd.small),
    "waveglow": Family(waveglow.full, waveglow.small),
}
