"""Typed functions as commands: several words per option, help from docstrings, one-line errors."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from lightning_mgpu.commands import run_command
from lightning_mgpu.errors import UsageError


def measure(
    output: Path,
    what: Literal["all", "steps"] = "all",
    models: Sequence[str] = ("LeNet",),
    devices: Sequence[int] = (2,),
    table: Path | None = None,
    csv: bool = False,
) -> dict[str, Any]:
    """Measure models.

    Args:
        output: The file to write.
        what: The thing to measure.
        models: Names or paths.
        devices: Numbers of devices.
        table: Another file.
        csv: A flag.
    """
    return locals()


def run(line: str, **defaults: Any) -> dict[str, Any]:
    return run_command(measure, line.split(), "python -m p measure", "  $ p measure\n", **defaults)


def test_options_are_the_parameters() -> None:
    usual = {"output": Path("x"), "what": "all", "models": ["LeNet"], "devices": [2]}
    usual |= {"table": None, "csv": False}
    assert run("--output=x") == usual
    assert run("--output x --what steps --table=y") == usual | {"what": "steps", "table": Path("y")}
    assert run("--output=x --models a.B C", devices=[9]) == usual | {
        "models": ["a.B", "C"],
        "devices": [9],
    }
    for line in ("--devices 2 3", "--devices=2 3", "--devices=[2,3]"):
        assert run(f"{line} --output=x") == usual | {"devices": [2, 3]}
    assert run("--csv --output=x") == run("--output=x --csv=true") == usual | {"csv": True}
    assert run("--output=x --models") == usual | {"models": []}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "measure: the following arguments are required: output"),
        ("--output=x --what=step", "measure: --what: Expected a typing.Literal['all', 'steps']"),
        ("--output=x --devices 2 b", "measure: --devices: Expected a <class 'int'>. Got value: b"),
        ("--output=x --device 2", "measure: unrecognized arguments: --device 2"),
        ("--output", "measure: argument --output: expected one argument"),
        ("foo --output=x", "measure: unrecognized arguments: foo"),
    ],
)
def test_mistakes_are_one_line(line: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        run(line)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_help_has_the_description_and_the_docstring(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        run("--help")
    text = capsys.readouterr().out
    assert "usage: python -m p measure" in text and "\n  $ p measure\n" in text
    assert "Numbers of devices." in text and "(required, type:" in text
