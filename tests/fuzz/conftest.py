"""Bad input, made up by hypothesis: a command line ends with status 0, or with one line and status 2, leaving nothing.

The examples are always the same ones, and few: raise `max_examples` and drop `derandomize` to go hunting.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from jsonargparse import Namespace

from lightning_mgpu import cli

JARGON = ("Traceback", "Parser key", "Namespace", "NestedArg", "Subtypes", "usage:")
settings.register_profile(
    "bounded",
    max_examples=40,
    derandomize=True,
    deadline=None,  # cores are shared; what hangs meets pytest-timeout
    database=None,
    phases=[Phase.explicit, Phase.generate],  # shrinking takes minutes: an example is a whole command line
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("bounded")


def files(directory: Path) -> list[Path]:
    """All but the unpacked data: whole and checked, it may stay of a dataset whose other files are bad."""
    return sorted(path for path in directory.rglob("*") if not path.name.endswith("-ubyte"))


@dataclass
class Outcome:
    """How a command line ended: accepted with a configuration, or refused with a line."""

    config: Namespace | None
    error: str


@pytest.fixture
def ends(
    main: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> Callable[..., Outcome]:
    """Give a command line to the program and hold its end to what is promised; `runs=False` stops before the run."""
    accepted: list[Namespace] = []
    run_subcommand = cli.CLI._run_subcommand

    def end(*args: str, runs: bool = False) -> Outcome:
        accepted.clear()

        def run(self: cli.CLI, subcommand: str) -> None:
            accepted.append(self.config[subcommand])

        # no wrapper around a real run: it would stand in tracebacks as code of the user's
        monkeypatch.setattr(cli.CLI, "_run_subcommand", run_subcommand if runs else run)
        before = files(tmp_path)
        capfd.readouterr()
        status = main(*args)
        err = "".join(
            line for line in capfd.readouterr().err.splitlines(keepends=True) if not line.startswith("warning: ")
        )
        shown = " ".join(map(repr, args))
        if status == 0:
            assert runs or not err, f"{shown}: {err}"
            shutil.rmtree(tmp_path / "runs", ignore_errors=True)
            return Outcome(accepted[0] if accepted else None, "")
        assert status == 2, shown
        assert err.startswith("error: ") and err.endswith(" (--traceback shows where)\n"), f"{shown}: {err}"
        assert err.count("\n") == 1 and not [word for word in JARGON if word in err], f"{shown}: {err}"
        assert files(tmp_path) == before, shown
        return Outcome(None, err)

    return end
