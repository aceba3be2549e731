"""PureJaxRL's PPO on CartPole: the whole training is one compiled program."""

# pyright: reportMissingImports=false

import numpy as np

from benchmarks.ported.port import Edit, Port
from benchmarks.ported.record import Recorder
from benchmarks.ported.stand_ins import restore_jax_names, stand_in

PORT = Port(
    title="PureJaxRL, PPO",
    repository="luchris429/purejaxrl",
    revision="31756b197773a52db763fdbe6d635e4b46522a73",
    file="purejaxrl/ppo.py",
    folder="purejaxrl",
    edits=(
        Edit("import optax\n", "import optax\nimport jmp_lite as jmp\n"),
        Edit("            tx=tx,", "            tx=jmp.with_loss_scale(tx),"),
        Edit(
            "                    def _loss_fn(",
            '                    @jmp.autocast(dtype="float16")\n                    def _loss_fn(',
        ),
        Edit(
            "jax.value_and_grad(_loss_fn, has_aux=True)",
            "jmp.value_and_grad(_loss_fn, jmp.get_loss_scale(train_state), has_aux=True)",
        ),
    ),
    size="CartPole, 4 environments, 16 minibatches an update",
    unit="updates",
    packages="distrax gym gymnasium gymnax==0.0.8",
    note=(
        "The whole training is one compiled program, so the table shows the return of an episode (higher is "
        "better) in place of the loss, and no inf was tried. The network that acts in the environment is not "
        "part of the loss, so it stays float32."
    ),
)
OTHERS = ()


def run(steps: int) -> Recorder:
    """Trains twice for some updates of 16 minibatches. Returns the recorded program.

    Its loss is the mean return of the episodes that ended during an update, with the sign of a loss.
    """
    stand_in("brax", "navix", "seaborn")
    restore_jax_names()
    import jax
    import ppo

    config = {
        "LR": 2.5e-4,
        "NUM_ENVS": 4,
        "NUM_STEPS": 128,
        "TOTAL_TIMESTEPS": 4 * 128 * steps,
        "UPDATE_EPOCHS": 4,
        "NUM_MINIBATCHES": 4,
        "GAMMA": 0.99,
        "GAE_LAMBDA": 0.95,
        "CLIP_EPS": 0.2,
        "ENT_COEF": 0.01,
        "VF_COEF": 0.5,
        "MAX_GRAD_NORM": 0.5,
        "ACTIVATION": "tanh",
        "ENV_NAME": "CartPole-v1",
        "ANNEAL_LR": True,
    }

    def returns(result):
        metrics = result["metrics"]
        ended = metrics["returned_episode"]
        total = (metrics["returned_episode_returns"] * ended).sum((1, 2))
        return np.asarray(total) / np.asarray(ended.sum((1, 2)))

    recorder = Recorder(jax.jit(ppo.make_train(config)), loss=returns)
    recorder(jax.random.PRNGKey(0))
    recorder.losses.clear()
    recorder(jax.random.PRNGKey(0))
    return recorder
