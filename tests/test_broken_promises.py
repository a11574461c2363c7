"""A broken promise is found, whatever breaks it, and the table shows it."""

import re
import subprocess
import sys

import pytest

from tests import test_promises
from tests.conftest import REPOSITORY
from tests.test_promises import PROMISES, RefusedError, Run, check

OTHERS = """
import os, time
from lightning.pytorch.strategies import DDPStrategy

class Other(DDPStrategy):
    def __init__(self, how="pass"):
        super().__init__()
        self.how = how
    def refuse(self):
        raise ValueError("not today")
    def _configure_launcher(self):
        if "in the Trainer" in self.how:
            self.refuse()
        super()._configure_launcher()
    def setup(self, trainer):
        exec(self.how)
        super().setup(trainer)
    def backward(self, loss, *args, **kwargs):
        return super().backward(1.001 * loss, *args, **kwargs)

class Slow(Other):
    def __init__(self):
        super().__init__("time.sleep(60)")
"""


@pytest.mark.parametrize(
    ("how", "error", "reason"),
    [
        ("pass", AssertionError, "Tensor-likes are not close!"),
        ("self.refuse()", RefusedError, "not today"),
        ("'in the Trainer'", RefusedError, "not today"),
        ("self.refuse() if self.global_rank else time.sleep(60)", RefusedError, "not today"),
        ("[a, b] = [1]", AssertionError, "ValueError: not enough values"),  # is no refusal
        ("raise TypeError('a fault')", AssertionError, "TypeError: a fault"),
        ("os._exit(0)", AssertionError, "a process ended with status 0"),
    ],
)
def test_what_is_wrong_is_found(how, error, reason, tmp_path, monkeypatch):
    (tmp_path / "others.py").write_text(OTHERS)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(error, match=reason):
        check("parameters", Run(tmp_path, "others.Other", 2, "cpu", {"how": how}))


def test_cases_see_something(tmp_path):
    """Nothing that is compared is empty, and different training gives different numbers."""
    run = Run(tmp_path, "auto", 1, "cpu", {})
    seen = {name: case(run) for name, case in PROMISES.items()}
    assert len(seen["logging in evaluation"][0]) == 3 and len(seen["save and resume"]) == 3
    states = [each for each in seen.values() if isinstance(each, dict)]
    num_different = len({float(state["net.0.weight"].sum()) for state in states})
    assert (len(states), num_different) == (9, 8)  # manual optimization trains as usual


def run_pytest(cwd, *args):
    """Status and output of the promises in a separate `pytest`."""
    case = f"{test_promises.__file__}::test_promise"
    command = [sys.executable, "-m", "pytest", "--tb=no", f"--rootdir={REPOSITORY}", case]
    done = subprocess.run([*command, *args], cwd=cwd, text=True, capture_output=True, timeout=280)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.weekly
def test_the_table_of_the_docs(tmp_path):
    """Lightning's `ddp` breaks three promises; the page has the reason in parentheses."""
    page = (REPOSITORY / "docs" / "strategies.md").read_text()
    table = re.search(r"^\| promise \|.*\n(\|.*\n)+", page, re.MULTILINE)[0]
    strategies = re.findall("`(.*?)`", table.splitlines()[0])
    status, output = run_pytest(tmp_path, "-n2", "--dist=worksteal", "--strategies", *strategies)
    assert status == 1 and re.sub(r" \([^|]*\)(?= \|)", "", table) in output, output


@pytest.mark.slow
@pytest.mark.weekly
def test_a_table_of_other_strategies(tmp_path):
    (tmp_path / "others.py").write_text(OTHERS)
    strategies = ("--strategies", "others.Slow", "others.Other")
    status, output = run_pytest(tmp_path, *strategies, "--timeout=9", "-x")
    assert status == 1 and "| parameters | no |  |" in output, output
    options = ("--options", "how=self.refuse()", "--devices=1")
    status, output = run_pytest(tmp_path, *options, "--strategies", "others.Other")
    assert status == 0 and "| parameters | refused |" in output, output
    status, output = run_pytest(tmp_path, "--strategies", "others.Missing")
    assert status == 4 and "others.Missing: no such strategy" in output, output
