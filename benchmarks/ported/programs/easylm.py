"""EasyLM's LLaMA: its llama_train.py from start to end, on bytes of the standard library."""

# pyright: reportMissingImports=false

import sys
import types

import numpy as np

from benchmarks.ported.data import byte_batches
from benchmarks.ported.port import Edit, Port
from benchmarks.ported.record import Recorder, recorded
from benchmarks.ported.stand_ins import restore_jax_names, stand_in

PORT = Port(
    title="EasyLM, LLaMA",
    repository="young-geng/EasyLM",
    revision="fe5b2c354e25d697fce7cd225e23bbbe72570da3",
    file="EasyLM/models/llama/llama_train.py",
    edits=(
        Edit("import numpy as np\n", "import jmp_lite as jmp\nimport numpy as np\n"),
        Edit(
            "get_optimizer(FLAGS.optimizer)\n",
            "get_optimizer(FLAGS.optimizer)\n    optimizer = jmp.with_loss_scale(optimizer)\n",
        ),
        # Not the loss: it draws keys from a generator, which would keep a tracer.
        Edit(
            "            logits = model.apply(",
            "            logits = jmp.autocast(model.apply, jnp.float16)(",
        ),
        Edit(
            "jax.value_and_grad(loss_and_accuracy, has_aux=True)",
            "jmp.value_and_grad(loss_and_accuracy, jmp.get_loss_scale(train_state), has_aux=True)",
        ),
    ),
    size="The program's main, on bytes of text: 2 blocks of width 64, 8 sequences of 64",
    packages="einops ml_collections mlxu 'transformers<5'",
    note=(
        "autocast wraps the model, not the loss, because the loss draws keys from a [stateful "
        "generator](../../docs/questions.md#why-do-i-get-an-unexpectedtracererror-or-a-tracecontexterror)."
    ),
)
OTHERS = ()


def run(steps: int) -> Recorder:
    """Trains for some steps with the program's own main. Returns the recorded step."""
    stand_in("gcsfs", "wandb", "datasets")
    restore_jax_names()
    sys.argv = [  # ml_collections reads the flags from here.
        "llama_train",
        f"--total_steps={steps}",
        "--llama.base_model=debug",
        "--llama.vocab_size=256",
        "--llama.hidden_size=64",
        "--llama.intermediate_size=128",
        "--optimizer.adamw_optimizer.lr=0.003",
        "--optimizer.adamw_optimizer.lr_warmup_steps=5",
        f"--optimizer.adamw_optimizer.lr_decay_steps={steps}",
    ]
    from EasyLM.models.llama import llama_train

    def batches():
        for tokens in byte_batches(steps, 8, 65):
            tokens = tokens.astype(np.int32)
            masks = np.ones((8, 64), np.float32)
            batch = {"input_tokens": tokens[:, :-1], "target_tokens": tokens[:, 1:], "loss_masks": masks}
            yield batch, {}

    class Dataset:
        seq_length = 64
        __iter__ = lambda self: batches()

    llama_train.AutoTokenizer = types.SimpleNamespace(from_pretrained=lambda name: None)
    llama_train.DatasetFactory.load_dataset = lambda *args: Dataset()
    llama_train.mlxu.WandBLogger = lambda **kwargs: types.SimpleNamespace(
        output_dir="", log=lambda values: None
    )
    llama_train.FLAGS(sys.argv)
    recorder = Recorder(
        None,
        loss=lambda result: result[2]["loss"],
        params=lambda args: args[0].params,
        new_params=lambda args, result: result[0].params,
    )
    with recorded(llama_train, "pjit", "train_step", recorder):
        llama_train.main(None)
    return recorder
