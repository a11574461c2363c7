"""Every block of docs/cookbook.md, in its order, in one process and on the tiny dataset.

Only the limits of a short run are appended; two devices become two replicas of this process.
"""

import csv
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.utils import save_image

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[1] / "docs" / "cookbook.md").read_text()
FILES = dict(re.findall(r"```python\n# (\S+)\n(.*?)```", PAGE, flags=re.DOTALL))
LINES = [
    line.removeprefix("OMP_NUM_THREADS=1 ")
    for block in re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
    for line in block.splitlines()
]
LIMITS = [f"--trainer.limit_{stage}_batches=2" for stage in ("train", "val", "test")]
SHORT = ["--trainer.max_epochs=1", "--data.val_size=101", "--output.pictures=false"]
TWO_REPLICAS = "--trainer.strategy.replicas=2"


@pytest.fixture
def kitchen(tmp_path: Path, main: Callable[..., int], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the page's files, and with images to predict."""
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "images").mkdir()
    for i in range(5):
        save_image(torch.rand(1, 28, 28), tmp_path / "images" / f"{i}.png")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_every_block_runs(
    kitchen: Path,
    root: Path,
    main: Callable[..., int],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
) -> None:
    said: dict[str, str] = {}
    for line in LINES:
        _, *words = shlex.split(line)
        if words[0] == "my_curves.py":
            monkeypatch.setattr(sys, "argv", words)
            figure = runpy.run_path(words[0])["figure"]
            assert [len(axes.lines) for axes in figure.axes] == [2, 2], "two metrics, two runs"
        else:
            assert words[:2] == ["-m", "lightning_mgpu"]
            options = [f"--data.root={root}", *SHORT, *LIMITS] if words[2] == "fit" else []
            options += [] if words[2] == "runs" else ["--trainer.accelerator=cpu"]
            if "--trainer.devices=2" in words:
                needs_processes = "--trainer.sync_batchnorm=true" in words
                options += ["--trainer.devices=1"] + [TWO_REPLICAS] * (not needs_processes)
            assert main(*words[2:], *options) == 0, line
        said[line] = capfd.readouterr().out
    outputs = list(said.values())

    rows = list(csv.DictReader((kitchen / "runs" / "folder" / "predictions.csv").open()))
    assert [row["index"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert any("model:    MobileNet" in out for out in outputs)
    assert any("testing epoch 1: val_f1" in out for out in outputs)
    assert (kitchen / "curves.png").exists()

    [look] = [out for line, out in said.items() if "my_look" in line]
    before = re.findall(r"replica \d, before: gradient (\S+)", look)
    after = re.findall(r"process 0 on \S+: weight (\S+), gradient (\S+)", look)
    assert len(before) == 2 * len(after) == 2 * 2, "two replicas, two steps"
    assert before[0] != before[1]

    run_notebook(FILES["my_notebook.py"], root)
    classify = runpy.run_path("my_classify.py")["classify"]
    torch.testing.assert_close(classify(torch.rand(7, 1, 28, 28)).sum(dim=1), torch.ones(7))


def run_notebook(code: str, root: Path) -> None:
    """The cell, with a short epoch on the tiny dataset."""
    code = code.replace("max_epochs=1", "max_epochs=1, limit_train_batches=2")
    code = code.replace("batch_size=256", f"batch_size=256, root={str(root)!r}, val_size=101")
    namespace: dict[str, Any] = {}
    exec(code, namespace)
    assert namespace["trainer"].strategy.num_replicas == 2
