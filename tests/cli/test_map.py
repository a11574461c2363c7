"""The map in cli/__init__.py names every stop of a `fit`, in order."""

import ast
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_mgpu import cli
from lightning_mgpu.cli import run_trainer

STOP = re.compile(r"\| +\d+ \| `(\w+\.py)` +\| ([\w.]+) +\|")
STOPS = [match.groups() for match in map(STOP.match, str(cli.__doc__).splitlines()) if match]
# called by run_trainer, but everyday runs do nothing there, or only make an object or a text
NOT_STOPS = {"ExitStack", "LastCheckpoint", "RunRecord", "check_can_resume", "choose_checkpoint"}
NOT_STOPS |= {
    "command",
    "getattr",
    "is_search",
    "keep_freed_memory",
    "leave_group",
    "rank_zero_warn",
    "str",
}


def test_a_fit_comes_by_every_stop(
    main: Callable, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    came_by: list[str] = []

    def note(function: Callable, name: str) -> Callable:
        def noted(*args: Any, **kwargs: Any) -> Any:
            came_by.append(name)
            return function(*args, **kwargs)

        return noted

    for file, name in STOPS[1:]:
        owner, _, method = name.partition(".")
        if isinstance(found := getattr(run_trainer, owner), type):
            function = getattr(found, method := method or "__init__")
            monkeypatch.setattr(found, method, note(function, name))
        else:
            function = found
            monkeypatch.setattr(run_trainer, owner, note(function, name))
        assert Path(inspect.getfile(function)).name == file
    options = (f"--data.root={root}", "--data.val_size=101", "--trainer.accelerator=cpu")
    assert main("fit", *options, "--trainer.devices=1", "--trainer.max_epochs=1") == 0
    assert ["main", *dict.fromkeys(came_by)] == [name for _, name in STOPS]
    assert len(STOPS) <= 12 and "lightning_mgpu.cli.main" in sys.modules


def test_run_trainer_calls_nothing_else() -> None:
    tree = ast.parse(inspect.getsource(run_trainer.run_trainer))
    calls = {node.func for node in ast.walk(tree) if isinstance(node, ast.Call)}
    names = {each.id for each in calls if isinstance(each, ast.Name)}
    assert names - NOT_STOPS == {name for _, name in STOPS} & names and names >= NOT_STOPS
