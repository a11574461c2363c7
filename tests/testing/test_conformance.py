"""Strategies keep their promises, and the suite reports one that does not."""

import os
import re
import shlex
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_mgpu.testing import PROMISES, PromiseResult, check_strategy
from lightning_mgpu.testing import __main__ as suite
from lightning_mgpu.testing.cases import _same_bits
from lightning_mgpu.testing.probe import Data, Probe, StrategySpec, replica_parameters

ALGORITHMS = ["manual_allreduce_tree", "manual_allreduce_sharded", "manual_allreduce_ring"]


@pytest.mark.slow
def test_a_sample_of_the_promises_under_ddp() -> None:
    promises = ["parameters", "replicas", "evaluation", "save", "resume", "error"]
    wrong = {result.name: result.wrong for result in check_strategy("ddp", 2, promises=promises)}
    assert wrong == dict.fromkeys(promises, "")


# one device cannot be shared out; Lightning's launcher leaves a thread; each shard is normalised
BROKEN_BY_NATURE = {"any_devices", "cleanup", "batchnorm"}


@pytest.mark.slow
def test_two_processes_keep_what_one_promises() -> None:
    strategy = "tests.strategies.runs_over_processes.in_two_processes"
    promises = [name for name in PROMISES if name not in BROKEN_BY_NATURE]
    results = check_strategy(strategy, 2, promises=promises, timeout=280.0)
    assert {result.name: result.wrong for result in results if not result.is_kept} == {}


WEEKLY = [
    ("auto", 1),
    ("ddp", 2),
    ("dp", 2),
    ("dp", 3),
    ("manual_allreduce", 2),
    *((name, 3) for name in ALGORITHMS),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "devices"),
    [("manual_allreduce", 3), *(pytest.param(*each, marks=pytest.mark.weekly) for each in WEEKLY)],
)
def test_all_promises(strategy: str, devices: int) -> None:
    for result in check_strategy(strategy, devices):
        message = result.wrong or "kept: take the reason away"
        assert result.is_kept != bool(result.reason), f"{result.name}: {message}"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("strategy", ["ddp", "dp"])  # manual_allreduce: tests/test_gpu.py
def test_promises_on_gpus(strategy: str) -> None:
    results = check_strategy(strategy, torch.cuda.device_count(), "gpu")
    broken = [result for result in results if result.wrong and not result.reason]
    assert not {result.name: result.wrong for result in broken}


STRATEGIES = """
    import os
    import subprocess
    import threading
    import time
    from types import SimpleNamespace

    import torch
    from lightning.pytorch.strategies import SingleDeviceStrategy


    class Broken(SingleDeviceStrategy):
        def training_step(self, batch, batch_idx):
            return super().training_step([part[-5:] for part in batch], batch_idx)

        def test_step(self, batch, batch_idx):
            return super().test_step([part[:100] for part in batch], batch_idx)

        @property
        def replicas(self):
            sets = {name: (p, p + 1) for name, p in self.lightning_module.named_parameters()}
            return SimpleNamespace(parameter_sets=sets)

        def teardown(self):
            threading.Thread(target=time.sleep, args=(1000,), name="left", daemon=True).start()
            torch.set_printoptions = lambda: None
            super().teardown()


    class Crashes(SingleDeviceStrategy):
        def training_step(self, *args):
            os.write(2, b"lost it")
            os._exit(0)


    class LeavesAProcess(SingleDeviceStrategy):
        def teardown(self):
            subprocess.Popen(["sleep", "60"])
            super().teardown()
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Callable:
    """Run the command beside a third party's strategies; returns its status and what it printed."""
    (tmp_path / "my_strategies.py").write_text(textwrap.dedent(STRATEGIES))
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["testing", *args])
        try:
            status = suite.main()
        except SystemExit as error:
            status = int(error.code or 0)
        return status, " ".join("".join(capsys.readouterr()).split())

    return run


@pytest.mark.slow
def test_a_broken_strategy_is_found_out(run: Callable) -> None:
    status, output = run("--strategy=my_strategies.Broken", "--devices=1")
    assert status == 1 and output.count("kept ") == 2 and output.count("BROKEN") == 22
    for wrong in (
        "BROKEN parameters after training are those of one device: Tensor-likes are not close!",
        "they differ after 10 steps",
        "every test sample counts once (10,007): Scalars",
        "cannot the same bits on any number of devices (`replicas=4`): it has no option",
        "left behind: the thread left, another torch.set_printoptions",
        "ended with no error at all",
    ):
        assert wrong in output


@pytest.mark.slow
@pytest.mark.weekly
def test_a_process_that_ends_without_a_word_or_never_is_found_out(run: Callable) -> None:
    first, second = check_strategy(
        "my_strategies.Crashes", 1, promises=["predictions", "parameters"]
    )
    assert first.is_kept and second.wrong == "ended with status 0: lost it"
    [last] = check_strategy("my_strategies.LeavesAProcess", 1, promises=["predictions"], timeout=20)
    assert last.wrong == "hangs, or leaves processes behind: not done after 20 s"


def test_what_is_compared_is_not_empty(tmp_path: Path) -> None:
    seen = {
        name: PROMISES[name].case(StrategySpec(), tmp_path)
        for name in ("gradients", "logging", "metrics", "bf16")
    }
    assert len(seen["gradients"]) == 8 * 4  # steps, parameters
    # a step's loss; from the second epoch on, that of the last epoch, too
    assert [len(row) for row in seen["logging"]] == [1] * 4 + [2] * 6
    assert len(seen["metrics"]) == 6 and seen["bf16"]["in_bf16"] == [1.0] * 10
    states = [{"weight": torch.ones(2)}, {"weight": torch.ones(2) + 1e-7}]
    assert _same_bits(states[:1] * 2) == "" and _same_bits(states) == "the runs differ"


@pytest.mark.parametrize(("strategy", "devices"), [("auto", 1), ("dp", 3), ("manual_allreduce", 3)])
def test_replicas_are_found(strategy: str, devices: int) -> None:
    class Counts(Probe):
        def on_train_batch_end(self, *args: Any) -> None:
            assert len(replica_parameters(self.trainer.strategy, self)) == devices

    StrategySpec(strategy, devices).trainer(max_steps=1).fit(Counts(), datamodule=Data())


@pytest.mark.slow
@pytest.mark.weekly
def test_a_third_partys_strategy(run: Callable) -> None:
    """The strategy of docs/adding.md, by the command that stands there."""
    page = (Path(__file__).parents[2] / "docs" / "adding.md").read_text()
    [(name, code)] = re.findall(r"```python\n# (my_strategy\.py)\n(.*?)```", page, flags=re.DOTALL)
    Path(name).write_text(code)
    [line] = re.findall(
        r"^python -m lightning_mgpu\.testing (--strategy=my_strategy.*)$", page, flags=re.MULTILINE
    )
    status, output = run(*shlex.split(line))
    assert status == 0 and "BROKEN" not in output
    assert output.count("kept") >= 2 * (len(PROMISES) - 2)


def test_mistakes_end_the_command_at_once(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = "error: strategy my_strategies.Missing: no such strategy."
    mistakes = [(["--strategy=my_strategies.Missing"], missing)]
    mistakes += [(["--table=my_strategies.py"], "has no lines <!-- promises: begin -->")]
    mistakes += [(["--table=nowhere.md"], "error: [Errno 2] No such file or directory: 'nowhere")]
    mistakes += [(["--devices", "two"], "error: lightning_mgpu.testing: --devices: Expected a ")]
    if not torch.cuda.is_available():
        no_gpu = "error: No supported gpu backend found!"
        mistakes += [(["--strategy=dp", "--accelerator=gpu"], no_gpu)]
    for args, message in mistakes:
        status, output = run(*args)
        assert status == 2 and message in output and "BROKEN" not in output
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    status, output = run("--strategy=dp", "--accelerator=gpu")
    assert status == 2 and "error: You requested gpu: [0, 1, 2]" in output
    assert "only has: [0]" in output


def test_table(run: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """A promise broken on one number of devices is broken; the reason is shown before the error."""
    wrong = {("ddp", 3, "uneven"): ("off by 1", "by nature")}
    wrong |= {("dp", 2, "metrics"): ("off by 2", "")}

    def check(strategy: str, devices: int, accelerator: str) -> list[PromiseResult]:
        return [
            PromiseResult(name, PROMISES[name], *wrong.get((strategy, devices, name), ("", "")))
            for name in PROMISES
        ]

    monkeypatch.setattr(suite, "check_strategy", check)
    Path("page.md").write_text(f"before {suite.BEGIN}\n| all columns |\n{suite.END} after")
    status, output = run("--table=page.md")
    lines = Path("page.md").read_text().splitlines()
    metrics = "torchmetrics objects have the value of one device"
    assert status == 1 and f"BROKEN {metrics}: off by 2" in output
    assert lines[0] == f"before {suite.BEGIN}" and lines[-1] == f"{suite.END} after"
    kept = " | ".join(["yes"] * 4)
    assert f"| ... with batches that do not divide evenly | yes | no (1) | yes | {kept} |" in lines
    assert f"| {metrics} | yes | yes | no (2) | {kept} |" in lines
    notes = [line for line in lines if line.startswith("(")]
    assert notes == ["(1) By nature.  ", "(2) Off by 2.  "]
