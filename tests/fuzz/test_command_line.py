"""Option names and values: what is accepted is what was asked for, whatever else ends in one line."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

CPU = "--trainer.accelerator=cpu"
SYNTHETIC = "--data.source=synthetic"
INTS = (
    *("data.batch_size", "data.val_size", "data.seed", "model.num_classes", "seed_everything"),
    *("trainer.max_epochs", "trainer.max_steps", "trainer.min_epochs", "trainer.accumulate_grad_batches"),
    *("trainer.check_val_every_n_epoch", "trainer.log_every_n_steps", "trainer.num_sanity_val_steps"),
    *("checkpoint.save_top_k", "checkpoint.every_n_epochs", "trainer.reload_dataloaders_every_n_epochs"),
)
FLOATS = (
    *("model.optimizer.lr", "model.optimizer.momentum", "model.optimizer.weight_decay"),
    *("trainer.limit_train_batches", "trainer.limit_val_batches", "trainer.overfit_batches"),
    *("trainer.gradient_clip_val", "trainer.val_check_interval"),
)
OTHERS = (
    *("data.normalize", "data.source", "data.pin_memory", "trainer.accelerator", "trainer.precision"),
    *("trainer.strategy", "trainer.gradient_clip_algorithm", "trainer.max_time", "trainer.deterministic"),
    *("trainer.profiler", "trainer.logger", "trainer.callbacks", "trainer.plugins", "trainer.fast_dev_run"),
    *("model", "data", "trainer", "model.optimizer", "model.lr_scheduler", "model.lr_interval", "malloc"),
    *("wandb.mode", "wandb.tags", "wandb.name", "checkpoint.monitor", "checkpoint.mode", "config", "ckpt_path"),
)
ODD = (
    *("", " ", "0", "-1", "-7", "1.0", "1", "1.5", "1e3", "1e300", "1e999", "nan", ".nan", "inf", "-.inf", "None"),
    *(
        "null",
        "~",
        "true",
        "no",
        "ten",
        "0x10",
        "1_000",
        "\u0661",
        "½",
        "9" * 25,
        "2020-13-45",
        "!!timestamp x",
        "!!int x",
    ),
    *("!!python/object:os.system x", "[", "{a: ", "[1, 2]", "[[[]]]", "{a: 1}", "{class_path: os.system}", "*a"),
    *(
        "&a [*a]",
        "@",
        "`ls`",
        "\t",
        "a\nb",
        "é",
        "💥",
        "'",
        '"',
        "../..",
        "/",
        "os.system",
        "builtins.print",
        "=",
        "--",
    ),
)
values = st.one_of(
    st.sampled_from(ODD),
    st.integers().map(str),
    st.floats().map(str),
    st.text(
        st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8
    ),  # as an operating system has
)


def meaning(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except Exception:
        return text


@settings(max_examples=30)
@given(st.sampled_from([*INTS, *FLOATS, *OTHERS]), values)
def test_any_value(ends: Callable, name: str, value: str) -> None:
    outcome = ends("fit", CPU, SYNTHETIC, f"--{name}={value}")
    if outcome.config is None or name not in (*INTS, *FLOATS):
        return
    *parents, last = name.split(".")
    got: Any = outcome.config
    for parent in parents:
        got = got[parent]
        got = got.get("init_args", got)
    got = got[last]
    assert got in (value, meaning(value)) or (not isinstance(got, str) and float(value) == got), (name, value, got)
    if got is not None and name != "seed_everything":  # which also takes true and false
        assert type(got) in ((int,) if name in INTS else (int, float, str)), (name, value, got)
        assert isinstance(got, str) or math.isfinite(got)


@settings(max_examples=10)
@given(st.sampled_from([*INTS, *FLOATS]), st.data())
def test_a_name_that_is_none(ends: Callable, name: str, data: st.DataObject) -> None:
    """A character lost, doubled, swapped or changed, or the rest left out: argparse itself takes abbreviations."""
    i = data.draw(st.integers(1, len(name) - 1))
    wrong = data.draw(
        st.sampled_from([name[:i], name[:i] + name[i + 1 :], name[:i] + name[i - 1 :], name[:i] + "q" + name[i:]])
    )
    if wrong in ("trainer", "data", "model", "model.optimizer", name):
        return
    error = ends("fit", CPU, SYNTHETIC, f"--{wrong}=1").error
    assert wrong in error or f"--{wrong.removeprefix('model.')}=1: no such option (did you mean --" in error


@pytest.mark.parametrize("wrong", ["--trainer.max_epoch=2", "--trainer.devic=1", "--run=x", "--no-wan", "--tracebac"])
def test_abbreviations_are_refused(ends: Callable, wrong: str) -> None:
    assert "did you mean --" in ends("fit", CPU, SYNTHETIC, wrong).error


WRONG_NUMBERS = {
    "--model.optimizer.lr=.nan": "--model.optimizer.lr=nan: expected a finite number",
    "--model.optimizer.lr=-.inf": "--model.optimizer.lr=-inf: expected a finite number",
    "--model.optimizer.lr=1e300": "--model.optimizer.lr=1e+300: expected a finite number, up to 3.4e+38",
    f"--trainer.max_epochs={10**22}": "too large a number",
    "--trainer.gradient_clip_val=-1": "--trainer.gradient_clip_val=-1: take at least 0",  # would climb
    "--trainer.accumulate_grad_batches=0": "--trainer.accumulate_grad_batches=0: take at least 1",
    "--trainer.accumulate_grad_batches=-2": "take at least 1",
    "--trainer.check_val_every_n_epoch=0": "take at least 1",
    "--trainer.check_val_every_n_epoch=-1": "take at least 1",
    "--trainer.log_every_n_steps=0": "take at least 1",
    "--trainer.num_sanity_val_steps=-3": "take at least -1",
    "--trainer.val_check_interval=0": "--trainer.val_check_interval=0: take batches from 1",
    "--trainer.val_check_interval=0.0": "--trainer.val_check_interval=0: take batches from 1",
    "--trainer.max_epochs=-5": "-5",
    "--trainer.max_epochs=1:30": "--trainer.max_epochs=1:30: would be read as the number 90",
    "--trainer.val_check_interval=10:00:00:00": "would be read as the number 2160000",
    "--trainer.max_epochs=#5": "--trainer.max_epochs=#5: would be read as null",
    "--trainer.max_epochs=!!timestamp x": "YAML tags are not taken",
    "--trainer.callbacks=--": "--trainer.callbacks=--: a value is missing",
    "--trainer.max_epochs=" + "[" * 90000: "nested too deeply",  # libyaml would overflow the stack
    "--trainer.callbacks=" + "['}'," * 26000: "nested too deeply",
    "--model=null": "--model=null: expected the name of a class",
    "--weights_only=false": "--weights_only=false: a checkpoint could run code",
}


@pytest.mark.parametrize("wrong", WRONG_NUMBERS)
def test_numbers_that_would_give_another_run(ends: Callable, wrong: str) -> None:
    assert WRONG_NUMBERS[wrong] in ends("fit", CPU, SYNTHETIC, wrong).error


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=6)
@given(st.sampled_from([*INTS, *FLOATS]), st.sampled_from(["-1", "0", "1", "2", "0.5", "1.0", "5000", "null"]))
def test_what_is_accepted_runs(ends: Callable, root: Any, name: str, value: str) -> None:
    """... or ends in a line: a number must not be found wrong by a division in the middle of the run."""
    limits = [f"--trainer.limit_{stage}_batches=2" for stage in ("train", "val", "test")]
    once = "--trainer.max_epochs=1"
    before = [arg for arg in (*limits, once, "--data.val_size=101") if not arg.startswith(f"--{name}=")]
    if not (name == "trainer.max_epochs" and value in ("-1", "null", "5000")):  # asked to train for long
        ends("fit", CPU, f"--data.root={root}", *before, f"--{name}={value}", runs=True)


@settings(max_examples=8)
@given(
    st.lists(st.sampled_from(["fit", "test", "--", "-", "-c", "--config", "--model", CPU, "=", "-h=1", "x", "--=1"]))
)
def test_any_words(ends: Callable, words: list[str]) -> None:
    ends(*words, "--trainer.devices=0")


def test_the_last_of_repeated_options_wins(ends: Callable) -> None:
    assert (
        ends("fit", CPU, SYNTHETIC, "--trainer.max_epochs=2", "--trainer.max_epochs=3").config.trainer.max_epochs == 3
    )
    assert re.search("LeNet$", ends("fit", CPU, SYNTHETIC, "--model=ResNet18", "--model=LeNet").config.model.class_path)
