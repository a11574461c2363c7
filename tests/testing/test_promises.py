"""Strategies keep their promises, and the suite reports one that does not."""

import json
import os
from pathlib import Path
from typing import IO, Any

import pytest

from lightning_mgpu.testing import __main__ as suite
from lightning_mgpu.testing import check_strategy
from lightning_mgpu.testing.cases import PROMISES, Run, answer
from tests.strategies.conftest import CONTEXT

STRATEGY = """
import os, time
from lightning.pytorch.strategies import SingleDeviceStrategy

class Other(SingleDeviceStrategy):
    def __init__(self, how):
        super().__init__()
        self.how = how
    def refuse(self):
        raise ValueError("not today")
    def setup(self, trainer):
        exec(self.how)
        super().setup(trainer)
    def backward(self, loss, *args, **kwargs):
        return super().backward(1.001 * loss, *args, **kwargs)
"""


def run_in_fork(command: list[str], output: IO[str]) -> Any:
    """In place of `run_in_group`: torch is imported there. Returns the status."""
    process = CONTEXT.Process(target=answer_into, args=(output.name, *command[-2:]))
    process.start()
    process.join()
    return process.exitcode


def answer_into(log: str, name: str, run: str) -> None:
    with Path(log).open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    answer(name, Run(*json.loads(run)))


@pytest.mark.parametrize(
    ("how", "answer", "note", "timeout"),
    [
        ("pass", "no", "Tensor-likes are not close!", 99),
        ("self.refuse()", "refused", "not today", 99),
        ("[a, b] = [1]", "no", "not enough values to unpack", 99),  # a defect, and no refusal
        ("raise TypeError('a fault')", "no", "ended with status 1: TypeError: a fault", 99),
        ("os._exit(0)", "no", "ended with status 0", 99),
        ("time.sleep(60)", "no", "ended with status 1: Timeout (0:00:02)!", 2),
    ],
)
def test_what_is_wrong_is_found(
    how: str, answer: str, note: str, timeout: float, tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "others.py").write_text(STRATEGY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("lightning_mgpu.testing.check.run_in_group", run_in_fork)
    [found] = check_strategy("others.Other", 1, promises=["parameters"], timeout=timeout, how=how)
    assert found[1] == answer and found[2].startswith(note)


@pytest.mark.slow
@pytest.mark.parametrize(
    "promises", [[*PROMISES][-2:-1], pytest.param([*PROMISES], marks=pytest.mark.weekly)]
)
def test_manual_allreduce_keeps_its_promises(promises: list[str]) -> None:
    found = check_strategy("manual_allreduce", promises=promises)
    assert [*found] == [(name, "yes", "") for name in promises]


def test_cases_see_something(tmp_path: Path) -> None:
    """Nothing that is compared is empty, and a case that trains another way sees other numbers."""
    seen = {name: case(Run(str(tmp_path), "auto", 1, "cpu", {})) for name, case in PROMISES.items()}
    assert len(seen["logging in evaluation"][0]) == 3 and len(seen["save and resume"]) == 3
    weights = [each["net.0.weight"] for each in seen.values() if isinstance(each, dict)]
    num_different = len({float(weight.sum()) for weight in weights})
    assert (len(weights), num_different) == (9, 8)  # manual optimization trains as usual


def test_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def check(strategy: str, devices: int, accelerator: str, **options: Any) -> Any:
        wrong = ("no", "off by 2") if strategy == "ddp" else ("refused", f"{devices} {options}")
        return [(name, *(wrong if name == "clipping" else ("yes", ""))) for name in PROMISES]

    monkeypatch.setattr(suite, "check_strategy", check)
    more = ["--devices", "3", "--options", "replicas=6"]
    monkeypatch.setattr("sys.argv", ["testing", "manual_allreduce", *more])
    assert suite.main() == 0
    assert "manual_allreduce, clipping: refused 3 {'replicas': 6}" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["testing", "auto", "ddp"])
    assert suite.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert "| promise | `auto` | `ddp` |" in lines and "| parameters | yes | yes |" in lines
    assert "| clipping | refused | no |" in lines


def test_a_mistake_ends_the_command(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("sys.argv", ["testing", "ddp", "others.Missing"])
    with pytest.raises(SystemExit, match="2"):
        suite.main()
    assert "others.Missing: no such strategy" in capsys.readouterr().err
