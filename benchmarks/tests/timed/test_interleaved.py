"""The times on a CPU: of an optimizer step with a loss scale, and of training steps in bfloat16."""

import re

import pytest

from benchmarks.arms.loss_scalers import PEERS
from benchmarks.timed import half_on_cpu, interleaved, optimizer_step


def test_steps_take_turns_and_the_first_two_turns_do_not_count(monkeypatch):
    clock, calls = [0.0], []

    def step(name, seconds):
        calls.append(name)
        # The first two turns of each step, three calls each, take a second more a call.
        clock[0] += seconds + (calls.count(name) <= 6)

    monkeypatch.setattr(interleaved.time, "process_time", lambda: clock[0])
    steps = {"fast": lambda: step("fast", 0.001), "slow": lambda: step("slow", 0.004)}
    times = interleaved.milliseconds(steps, blocks=3, count=3)
    assert times == {"fast": pytest.approx(1.0), "slow": pytest.approx(4.0)}
    assert calls == (["fast"] * 3 + ["slow"] * 3) * 5


@pytest.mark.parametrize("mode", [[], ["--eager"]])
def test_the_table_of_an_optimizer_step(mode, capsys):
    optimizer_step.main(["--leaves", "2", "--width", "8", "--blocks", "1", *mode])
    rows = re.findall(r"^(\S.*?) +([\d.]+) +([\d.]+) +([\d.]+)$", capsys.readouterr().out, re.MULTILINE)
    assert [row[0] for row in rows] == list(PEERS)
    assert {row[0]: row[2] for row in rows}["plain"] == "1.00"
    assert {row[0]: row[3] for row in rows}["jmp 0.0.4"] == "1.00"


@pytest.mark.exhaustive
def test_the_table_of_bfloat16_steps(capsys):
    half_on_cpu.main(["--size", "small", "--blocks", "1", "--steps", "1"])
    lines = capsys.readouterr().out.splitlines()
    arms = (*half_on_cpu.JAX_ARMS, *half_on_cpu.TORCH_ARMS)
    rows = [line.split() for line in lines[1:4]]
    assert [row[0] for row in rows] == ["MLP", "GPT", "CNN"]
    assert all(len(row) == 1 + len(arms) and min(map(float, row[1:])) >= 0 for row in rows)
    assert "jax" in lines[4]


@pytest.mark.parametrize("name", half_on_cpu.WORKLOADS["small"])
@pytest.mark.parametrize("arm", half_on_cpu.JAX_ARMS)
def test_the_products_of_an_arm_are_in_its_dtype(name, arm):
    import jax

    from tests.support.jaxprs import equations

    workload = half_on_cpu.WORKLOADS["small"][name]()
    statistics, loss = workload.init(0), half_on_cpu.loss_of(arm, workload)
    params = statistics.pop("params")
    step = jax.grad(lambda params: loss(params, statistics, workload.batch(0))[0])
    products = [
        equation
        for equation in equations(jax.make_jaxpr(step)(params).jaxpr)
        if equation.primitive.name in ("dot_general", "conv_general_dilated")
    ]
    dtypes = {str(operand.aval.dtype) for equation in products for operand in equation.invars}
    assert products
    assert dtypes == {"float32" if arm == "float32" else "bfloat16"}
