"""The map in cli/__init__.py names every stop of a `fit`, in order."""

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from lightning_mgpu import cli

STOP = re.compile(r"\| \d \| `(\w+)/(\w+)\.py` +\| ([\w.]+) +\|")
STOPS = [match.groups() for match in map(STOP.match, str(cli.__doc__).splitlines()) if match]


def test_a_fit_comes_by_every_stop(
    main: Callable, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    came_by = ["main"]

    def note(owner: Any, name: str, path: str) -> None:
        function = getattr(owner, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            came_by.append(path)
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, noted)

    for package, file, path in STOPS[1:]:
        module = import_module(f"lightning_mgpu.{package}.{file}")
        owner, _, name = path.rpartition(".")
        if owner:
            note(getattr(module, owner), name, path)
        else:  # it is imported by name where it is called
            note(import_module("lightning_mgpu.cli.training_cli"), name, path)
    options = (f"--data.root={root}", "--data.val_size=101", "--trainer.accelerator=cpu")
    assert main("fit", *options, "--trainer.devices=1", "--trainer.max_epochs=1") == 0
    assert [*dict.fromkeys(came_by)] == [path for *_, path in STOPS]
    assert len(STOPS) == 6
