"""Every strategy keeps what it promises, and the suite says so of one that does not. Slow: processes of their own."""

import functools
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_mgpu.testing import PROMISES, Result, check_strategy
from lightning_mgpu.testing import __main__ as suite
from lightning_mgpu.testing.cases import Kind
from lightning_mgpu.testing.check import run_cases
from lightning_mgpu.testing.promises import close, reason
from lightning_mgpu.testing.table import BEGIN, END, to_markdown

pytestmark = pytest.mark.slow

ALGORITHMS = ["manual_allreduce_tree", "manual_allreduce_sharded", "manual_allreduce_ring"]
# three processes of `ddp` are Lightning's affair; the table of docs/strategies.md has them
ON_CPU = [("auto", 1), ("ddp", 2), *((name, k) for name in ("dp", "manual_allreduce") for k in (2, 3))]


@functools.cache
def outcome(strategy: str, devices: int, accelerator: str = "cpu") -> dict[str, Result]:
    return {result.name: result for result in check_strategy(strategy, devices, accelerator)}


@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize(("strategy", "devices"), [*ON_CPU, *((name, 3) for name in ALGORITHMS)])
def test_promise(strategy: str, devices: int, promise: str) -> None:
    result = outcome(strategy, devices)[promise]
    if devices > 1 and reason(strategy, promise):
        assert not result.is_kept, "kept after all: take the reason why it cannot be away"
    else:
        assert result.is_kept, result.wrong


AT_EXIT = """
import atexit, os, pathlib, sys
def look():
    if "lightning_mgpu" in sys.modules and (dist := sys.modules.get("torch.distributed")):
        pathlib.Path({directory!r}, f"rank{{os.environ.get('LOCAL_RANK', 0)}}").write_text(str(dist.is_initialized()))
atexit.register(look)  # before all others: it is called last
"""


def test_processes_leave_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(AT_EXIT.format(directory=str(tmp_path)))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    (seen,) = run_cases(Kind("ddp", 2), [("parameters", {})], tmp_path)
    assert not seen.error
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["False"] * 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("strategy", ["ddp", "dp", "manual_allreduce", *ALGORITHMS])
def test_promises_on_gpus(strategy: str) -> None:
    devices = torch.cuda.device_count()
    broken = {name: result.wrong for name, result in outcome(strategy, devices, "gpu").items() if not result.is_kept}
    assert all(reason(strategy, name) for name in broken), broken


KINDS = [Kind("auto", 1), Kind("ddp", 2), Kind("dp", 3), Kind("manual_allreduce", 2)]


@functools.cache
def saved(directory: Path) -> dict[bool, Any]:
    """Leaves every kind's checkpoints; returns how one device's runs, without and with a scaler, have ended."""
    alone: dict[bool, Any] = {}
    for kind in KINDS:
        seen = run_cases(kind, [("save", {"with_scaler": with_scaler}) for with_scaler in (False, True)], directory)
        assert not any(each.error for each in seen)
        alone = alone or {with_scaler: each.value for with_scaler, each in zip((False, True), seen)}
    return alone


@pytest.mark.parametrize("after", KINDS, ids=lambda kind: kind.name)
def test_checkpoints_of_every_strategy_go_on_under_every_other(
    after: Kind, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """From the middle of an epoch, with AdamW, a scheduler stepped every batch, and a GradScaler."""
    directory = tmp_path_factory.getbasetemp() / "checkpoints"
    directory.mkdir(exist_ok=True)
    uninterrupted = saved(directory)
    cases = [(kind, with_scaler) for kind in KINDS for with_scaler in (False, True)]
    specs = [("resume", {"before": vars(kind), "with_scaler": with_scaler}) for kind, with_scaler in cases]
    assert uninterrupted[True]["scaler"][0]["scale"] > 2**16  # it has grown
    for (before, with_scaler), seen in zip(cases, run_cases(after, specs, directory)):
        assert not seen.error
        assert not close(1e-10)(seen.value, uninterrupted[with_scaler]), (before, with_scaler)


STRATEGIES = '''
    import subprocess
    import threading
    import time

    from lightning_mgpu.strategies import ManualAllreduceStrategy


    class FirstReplicaOnly(ManualAllreduceStrategy):
        """Forgets the gradients of the others."""

        def reduce_gradients(self):
            for first, *others in self._replicas.parameters:
                for other in others:
                    other.grad = first.grad.clone()
            self.gradients.are_reduced = True


    class UpdatesTheFirst(ManualAllreduceStrategy):
        def update_replicas(self, n):
            pass


    class Hangs(ManualAllreduceStrategy):
        def reduce_gradients(self):
            time.sleep(1000)


    class LeavesThread(ManualAllreduceStrategy):
        def teardown(self):
            threading.Thread(target=time.sleep, args=(1000,), name="left", daemon=True).start()
            super().teardown()


    class LeavesProcess(ManualAllreduceStrategy):
        def teardown(self):
            subprocess.Popen(["sleep", "1000"])
            super().teardown()


    class Swallows(ManualAllreduceStrategy):
        def run_step(self, name, batch, *args, **kwargs):
            try:
                return super().run_step(name, batch, *args, **kwargs)
            except ValueError:
                raise SystemExit(0)


    class DropsTheRest(ManualAllreduceStrategy):
        """Evaluates as many samples as divide evenly."""

        def evaluate(self, name, batch, *args, **kwargs):
            whole = len(batch[0]) // len(self.devices) * len(self.devices)
            return super().evaluate(name, [part[:whole] for part in batch], *args, **kwargs)
'''


@pytest.fixture
def strategies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a third party's strategies, from which Python imports."""
    (tmp_path / "my_strategies.py").write_text(textwrap.dedent(STRATEGIES))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    return tmp_path


def command(directory: Path, *args: str) -> tuple[int, str]:
    result = subprocess.run(
        [sys.executable, "-m", "lightning_mgpu.testing", *args],
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=280,
    )
    return result.returncode, result.stdout + result.stderr


def test_a_third_partys_strategy(tmp_path: Path) -> None:
    """That of docs/adding.md, with its command."""
    page = (Path(__file__).parents[2] / "docs" / "adding.md").read_text()
    [(name, code)] = re.findall(r"```python\n# (my_strategy\.py)\n(.*?)```", page, flags=re.DOTALL)
    (tmp_path / name).write_text(code)
    [line] = re.findall(r"^python -m lightning_mgpu\.testing (--strategy=my_strategy.*)$", page, flags=re.MULTILINE)
    code, output = command(tmp_path, *shlex.split(line))
    assert code == 0, output
    assert output.count("kept  ") == 2 * (len(PROMISES) - 1) and output.count("cannot") == 2  # BatchNorm


def test_a_broken_one_in_one_command(strategies: Path) -> None:
    code, output = command(
        strategies, "--strategy=my_strategies.FirstReplicaOnly", "--devices=2", "--promises", "parameters", "replicas"
    )
    assert code == 1
    assert "BROKEN  parameters after training are those of one device: relative error" in output
    assert "kept    replicas" in output


@pytest.mark.parametrize(
    ("strategy", "promise", "wrong"),
    [
        ("FirstReplicaOnly", "gradients", "relative error"),
        ("UpdatesTheFirst", "replicas", "not after 10 of 10 steps"),
        ("Hangs", "parameters", "hangs: nothing for 5 s"),
        ("LeavesThread", "cleanup", "threads: left"),
        ("LeavesProcess", "cleanup", "leaves processes behind"),
        ("Swallows", "error", "SystemExit"),
        ("DropsTheRest", "evaluation", "samples were counted instead of 10,007"),
    ],
)
def test_a_broken_strategy_is_found_out(strategy: str, promise: str, wrong: str, strategies: Path) -> None:
    timeout = 5 if strategy == "Hangs" else 60
    [result] = check_strategy(f"my_strategies.{strategy}", 3, promises=[promise], timeout=timeout)
    assert not result.is_kept and wrong in result.wrong


@pytest.mark.parametrize("strategy", ["my_strategies.Missing", "missing.Missing", "missing"])
def test_a_strategy_nobody_knows(strategy: str, strategies: Path) -> None:
    code, output = command(strategies, f"--strategy={strategy}")
    assert code == 2 and f"error: strategy '{strategy}'" in output and "Traceback" not in output


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--table=page.md --strategy=ddp", "--table writes all columns and rows anew: leave --strategy"),
        ("--table=page.md --promises metrics", "--table writes all columns and rows anew: leave --strategy"),
        ("--table=missing.md", "--table: missing.md: No such file"),
        ("--table=bare.md", "--table: bare.md has no lines <!-- promises: begin -->"),
    ],
)
def test_a_table_that_would_be_lost_is_told_at_once(
    given: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    page = f"{BEGIN}\n| all columns |\n{END}\n"
    Path("page.md").write_text(page)
    Path("bare.md").touch()
    monkeypatch.setattr("sys.argv", ["testing", *given.split()])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(suite, "check_strategy", lambda *args: [])
    with pytest.raises(SystemExit):
        suite.main()
    assert said in " ".join(capsys.readouterr().err.split()) and Path("page.md").read_text() == page


def test_table() -> None:
    outcomes = {("auto", "uneven"): "", ("ddp", "uneven"): "relative error 0.1", ("ddp", "metrics"): "relative error 1"}
    lines = to_markdown(["auto", "ddp"], outcomes).splitlines()
    assert lines[2] == "| ... with batches that do not divide evenly | yes | no (1) |"
    assert lines[3] == "| torchmetrics objects have the value of one device |  | no (2) |"
    assert lines[5].startswith("(1) The means of the processes") and lines[6].startswith("(2) Relative error 1")
