"""What a sweep's YAML asks for, and what of it is refused; the shipped files name options there are."""

import random
import shlex
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_mgpu.cli.yaml_files import CONFIGS
from lightning_mgpu.runs.errors import UsageError
from lightning_mgpu.sweep.plan import Parameter, Plan, read_parameter, read_plan
from lightning_mgpu.sweep.report import write_report

SHIPPED = sorted((CONFIGS / "sweep").glob("*.yaml"))
SWEEP: dict[str, Any] = {
    "program": "lightning_mgpu",
    "command": ["${env}", "python", "-m", "lightning_mgpu", "fit", "--data.source=synthetic", "${args}"],
    "method": "grid",
    "metric": {"name": "val_acc", "goal": "maximize"},
    "parameters": {"model.optimizer.lr": {"values": [0.1, 0.2, 0.3]}, "data.batch_size": {"min": 3, "max": 4}},
}


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., Plan]:
    """The plan of `SWEEP` with other keys; None leaves one out."""

    def read(count: int | None = None, **changes: Any) -> Plan:
        sweep = {key: value for key, value in {**SWEEP, **changes}.items() if value is not None}
        (tmp_path / "my.yaml").write_text(yaml.safe_dump(sweep))
        return read_plan(str(tmp_path / "my.yaml"), count)

    return read


def test_grid_is_every_combination_with_names_in_the_agents_order(plan: Callable[..., Plan]) -> None:
    found = plan(project="fashion")
    assert found.arguments == ["--data.source=synthetic", "--wandb.project=fashion"]
    assert (found.name, found.metric, found.maximize, found.num_trials) == ("my", "val_acc", True, 6)
    trials = [found.trial(index, seed=0) for index in range(6)]
    assert [list(trial) for trial in trials] == [["data.batch_size", "model.optimizer.lr"]] * 6
    assert [tuple(trial.values()) for trial in trials] == [(b, lr) for b in (3, 4) for lr in (0.1, 0.2, 0.3)]
    assert plan(count=2).num_trials == 2 and plan(run_cap=4).num_trials == 4 and plan(count=99).num_trials == 6


@pytest.mark.parametrize("step", [{}, {"distribution": "q_uniform", "q": 0.25}])
def test_a_long_range_takes_no_memory(step: dict[str, Any], plan: Callable[..., Plan], tmp_path: Path) -> None:
    many = {"min": 0, "max": 300_000, **step}
    tracemalloc.start()
    try:
        long = plan(parameters={"seed_everything": many, "x": {"values": [1, 2]}}, count=2)
        trials = [long.trial(index, seed=0) for index in range(2)]
        result = {"values": trials[0], "seconds": 1.0, "error": None, "metrics": {"val_acc": [0.1, 0.2]}, "trial": 0}
        write_report(long, [result], tmp_path, "sweep")
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()
    assert trials == [{"seed_everything": 0, "x": 1}, {"seed_everything": 0, "x": 2}]


def test_random_draws_depend_on_seed_and_trial_alone(plan: Callable[..., Plan]) -> None:
    short, long = plan(method="random", count=2), plan(method="random", run_cap=9)
    assert (short.num_trials, long.num_trials) == (2, 9)
    assert [short.trial(i, 7) for i in range(2)] == [long.trial(i, 7) for i in range(2)]
    assert len({str(long.trial(i, 7)) for i in range(9)}) > 3
    assert [long.trial(i, 7) for i in range(9)] != [long.trial(i, 8) for i in range(9)]


@pytest.mark.parametrize(
    ("given", "kind", "low", "high"),
    [
        ({"value": 3}, "constant", 3, 3),
        ({"values": [1, 5, 2]}, "categorical", 1, 5),
        ({"values": [1, 5, 2], "probabilities": [0.5, 0.4, 0.1]}, "categorical_w_probabilities", 1, 5),
        ({"min": 2, "max": 4}, "int_uniform", 2, 4),
        ({"min": 2, "max": 4.5}, "uniform", 2, 4.5),
        ({"min": 0.1, "max": 10, "distribution": "log_uniform_values"}, "log_uniform_values", 0.1, 10),
        ({"min": 0, "max": 1, "q": 0.1, "distribution": "q_uniform"}, "q_uniform", 0, 1),
        ({"min": 1, "max": 99, "distribution": "q_log_uniform_values"}, "q_log_uniform_values", 1, 99),
        ({"mu": 5, "sigma": 0.1, "distribution": "normal"}, "normal", 4, 6),
        ({"mu": 0, "sigma": 0.1, "distribution": "log_normal"}, "log_normal", 0.4, 2.5),
    ],
)
def test_draws_of_a_distribution(given: dict[str, Any], kind: str, low: float, high: float) -> None:
    parameter = read_parameter("x", given)
    assert parameter.distribution == kind
    draws = [parameter.draw(random.Random(i)) for i in range(500)]
    assert low <= min(draws) <= max(draws) <= high
    if choices := [parameter.choice(index) for index in range(parameter.num_choices)]:
        assert set(draws) <= {*choices, high}
        assert len(set(draws)) >= len(choices)


def test_log_uniform_spreads_evenly_over_decades() -> None:
    parameter = read_parameter("lr", {"min": 0.01, "max": 1, "distribution": "log_uniform_values"})
    below = sum(parameter.draw(random.Random(i)) < 0.1 for i in range(1000))
    assert parameter.is_log and 430 < below < 570


def parameters(**given: Any) -> dict[str, Any]:
    return {"parameters": {"x": given}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"method": None}, ["no method", "command: [python, -m, lightning_mgpu, fit, '${args}']"]),
        ({"method": "hyperband"}, ["method: hyperband: choose one of grid, random, bayes"]),
        ({"method": "random"}, ["a random sweep has no end", "--count=20"]),
        ({"metric": "val_acc"}, ["metric needs a name and a goal"]),
        ({"metric": {"name": "val_acc", "goal": "up"}}, ["goal: up: choose minimize or maximize"]),
        ({"parametres": {}}, ["parametres: no such key (did you mean parameters?)"]),
        ({"parameters": {}}, ["parameters needs options by name"]),
        ({"run_cap": 0}, ["run_cap: 0: choose 1 or more"]),
        ({"command": None, "program": "train.py"}, ["no command"]),
        ({"command": ["python", "train.py", "${args}"]}, ["a local sweep runs `fit` of this package"]),
        ({"command": ["python", "-m", "lightning_mgpu", "fit"]}, ["${args}"]),
        ({"command": ["lightning-mgpu", "fit", "${args}", "${args_json}"]}, ["${args_json} is filled in by the W&B"]),
        (parameters(min=0.1, max=1.0), ["x: a grid needs values, not uniform; or say method: random"]),
        (parameters(min="1e-3", max=1.0), ["x: min: '1e-3' is no number; YAML takes 0.001 or 1.0e-3"]),
        (parameters(min=2, max=1), ["x: min: 2 is not below max: 1"]),
        (parameters(min=0, max=1, distribution="log_uniform_values"), ["log_uniform_values begins above 0"]),
        (parameters(min=-3, max=1, distribution="log_uniform"), ["not done here; choose log_uniform_values"]),
        (parameters(min=0.5, max=3, distribution="int_uniform"), ["from one whole number to another"]),
        (parameters(min=0, max=1, q=0, distribution="q_uniform"), ["q: 0: choose one above 0"]),
        (parameters(values=3), ["values: 3 is no list"]),
        (parameters(values=[1, 2], probabilities=[1]), ["as many probabilities as values"]),
        (parameters(min=3), ["x: max: uniform takes min, max"]),
        (parameters(valeus=[1]), ["x: ", "give value, values, or min and max"]),
        (parameters(parameters={"lr": {"value": 1}}), ["x is nested: write the dotted name"]),
        ({"parameters": {"x": 3}}, ["x: 3: write {value: 3}"]),
    ],
)
def test_refused_in_one_line(changes: dict[str, Any], words: list[str], plan: Callable[..., Plan]) -> None:
    with pytest.raises(UsageError) as error:
        plan(**changes)
    message = str(error.value)
    assert "my.yaml" in message and "\n" not in message and all(word in message for word in words), message


def test_early_termination_is_left_out_with_a_note(plan: Callable[..., Plan]) -> None:
    [note] = plan(early_terminate={"type": "hyperband", "min_iter": 3}).notes
    assert note.startswith("early_terminate is left out here")


@pytest.mark.slow
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_sweep_names_options_there_are(
    path: Path, main: Callable[..., int], capsys: pytest.CaptureFixture
) -> None:
    plan = read_plan(str(path))
    assert f"sweep --config sweep/{path.name}" in path.read_text()
    for index in (0, (plan.num_trials or 1) - 1):
        values = plan.trial(index, seed=0)
        assert main("fit", *plan.arguments, *(f"--{k}={v}" for k, v in values.items()), "--print_config") == 0
        config = yaml.safe_load(capsys.readouterr().out)
        for name, value in values.items():
            assert option(config, name) == value or option(config, name).endswith(f".{value}")


def option(config: dict[str, Any], name: str) -> Any:
    """The value of a dotted option in a resolved configuration: of a class, its path."""
    found: Any = config
    for part in name.split("."):
        found = found[part] if part in found else found["init_args"][part]
    return found["class_path"] if isinstance(found, dict) else found


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_wandbs_own_functions_make_the_same_command(path: Path) -> None:
    from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

    plan, sweep = read_plan(str(path)), yaml.safe_load(path.read_text())
    values = plan.trial(0, seed=0)
    flags = create_sweep_command_args({"args": {name: {"value": value} for name, value in values.items()}})["args"]
    command = [
        part for word in create_sweep_command(sweep["command"]) for part in (flags if word == "${args}" else [word])
    ]
    assert command == [
        *shlex.split("python -m lightning_mgpu fit"),
        *plan.arguments,
        *(f"--{name}={value}" for name, value in values.items()),
    ]


def test_quantised_choices_stop_before_the_maximum() -> None:
    parameter = Parameter("x", "q_uniform", {"min": 0.0, "max": 0.3, "q": 0.1})
    assert [parameter.choice(index) for index in range(parameter.num_choices)] == [0.0, 0.1, 0.2]
