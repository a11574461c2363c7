"""Every file and every command of docs/adding.md and of the README's own allreduce, as printed.

Only the limits of a short run are appended. The commands of directories that can be deleted are
tried by their own tests.
"""

import csv
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import run_devices

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[1]
ALLREDUCE = (
    (REPOSITORY / "README.md")
    .read_text()
    .partition("\n## Your own allreduce\n")[2]
    .partition("\n## ")[0]
)
SECTION = (REPOSITORY / "docs" / "adding.md").read_text() + ALLREDUCE.partition(
    "\nA model, a dataset"
)[0]
FILES = dict(re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", SECTION, flags=re.DOTALL))
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", SECTION, flags=re.DOTALL)
    for line in block.splitlines()
]
TESTS = [line for line in COMMANDS if line.startswith("python -m pytest ")]
RUNS = [line for line in COMMANDS if line.startswith("python -m lightning_mgpu fit ")]
CPU = "--trainer.accelerator=cpu"
SHORT = (CPU, "--data.source=synthetic", "--trainer.max_epochs=1")
LIMITS = tuple(f"--trainer.limit_{stage}_batches=2" for stage in ("train", "val", "test"))


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).write_text(f"# {name}\n{content}")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def shell(command: Any) -> Callable[[str], str]:
    """Run a printed command with this Python; returns what it prints."""

    def shell(line: str) -> str:
        code, out, err = command.finish(command.start(launcher=shlex.split(line)[1:]), timeout=200)
        assert code == 0, f"{line}\n{out}\n{err}"
        return out

    return shell


def epochs(run_dir: Path) -> list[tuple[float, ...]]:
    """Loss and accuracy of training and validation, one row per epoch."""
    rows = list(csv.DictReader((run_dir / "metrics.csv").open()))
    names = ("train_loss", "train_acc", "val_loss", "val_acc")
    return list(zip(*([float(row[name]) for row in rows if row[name]] for name in names)))


def test_their_tests_pass(project: Path, shell: Callable) -> None:
    """Three commands in one process, which takes seconds to start."""
    others = [line for line in COMMANDS if line not in (*TESTS, *RUNS)]
    assert all(
        re.match(r"python -m lightning_mgpu[. ](testing|benchmark) ", line) for line in others
    )
    assert len(RUNS) == 6
    names = " ".join(line.removeprefix("python -m pytest ") for line in TESTS)
    assert re.search(r"^=* ?3 passed", shell(f"python -m pytest {names}"), flags=re.MULTILINE)


def test_a_model_trains_and_is_found_by_its_checkpoint(
    project: Path, main: Callable[..., int], capfd: pytest.CaptureFixture
) -> None:
    """Under a strategy of one process; under ddp it trains below."""
    [line] = [line for line in RUNS if "my_data" not in line and "my_model" in line]
    options = (*SHORT, *LIMITS, "--trainer.strategy=manual_allreduce")
    assert main(*shlex.split(line)[3:], *options) == 0
    out = capfd.readouterr().out
    assert "epoch 1/1" in out and f"sec/epoch on {run_devices(2)}" in out
    # the checkpoint alone says which model it is
    (path,) = project.glob("runs/*/checkpoints/last.ckpt")
    assert main("test", f"--ckpt_path={path}", CPU, "--data.source=synthetic", *LIMITS) == 0


@pytest.mark.parametrize("part", ["my_strategy", "my_top_k", "my_allreduce"])
def test_its_command_trains(
    part: str, project: Path, main: Callable[..., int], capfd: pytest.CaptureFixture
) -> None:
    [line] = [line for line in RUNS if part in line]
    assert main(*shlex.split(line)[3:], *SHORT, *LIMITS) == 0
    out = capfd.readouterr().out
    assert "epoch 1/1" in out and f"sec/epoch on {run_devices(2)}" in out


def test_a_dataset_keeps_the_batch_contract(project: Path, shell: Callable, main: Callable) -> None:
    """Under ddp on two devices it learns the same as on one device and by the book's algorithm."""
    [line] = [line for line in RUNS if "my_data" in line]
    out = shell(f"{line} {CPU} --run_dir=ddp")
    assert "batch:    100 global, 50 per device" in out and "MLP, 50,890 parameters" in out
    assert "sec/epoch on [device(type='cpu'), device(type='cpu')]" in out
    args = [arg for arg in shlex.split(line)[3:] if "devices" not in arg]
    assert main(*args, CPU, "--trainer.devices=1", "--run_dir=one") == 0
    strategy = ("--trainer.devices=3", "--trainer.strategy=manual_allreduce")
    assert main(*args, CPU, *strategy, "--run_dir=manual") == 0
    one = epochs(project / "one")
    assert len(one) == 2 and one[1][3] > 0.9, "it learns"
    for name in ("ddp", "manual"):
        for expected, got in zip(one, epochs(project / name), strict=True):
            assert got == pytest.approx(expected, rel=1e-4), name


@pytest.mark.skipif(
    run_devices(1)[0].type == "sim", reason="on simulated devices: they have no fused GRU"
)
def test_a_loss_per_token(
    project: Path, main: Callable[..., int], capfd: pytest.CaptureFixture
) -> None:
    [line] = [line for line in RUNS if "my_language_model" in line]
    assert main(*shlex.split(line)[3:], CPU, "--trainer.max_epochs=1") == 0
    assert "  loss_per_token 2." in capfd.readouterr().out


def test_a_plain_lightning_module(main: Callable[..., int], capfd: pytest.CaptureFixture) -> None:
    """Lightning's own, with plain loaders."""
    boring = "lightning.pytorch.demos.boring_classes.Boring"
    parts = (f"--model={boring}Model", f"--data={boring}DataModule", "--trainer.max_epochs=1")
    assert (
        main(
            "fit",
            *parts,
            CPU,
            *LIMITS,
            "--trainer.devices=2",
            "--trainer.strategy=manual_allreduce",
        )
        == 0
    )
    assert "model:    BoringModel, 66 parameters" in capfd.readouterr().out
