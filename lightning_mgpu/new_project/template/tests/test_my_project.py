"""Unit tests, and a short training run from the command line."""

import subprocess
import sys
from pathlib import Path

import torch

from my_project import MyData, MyModel


def test_model_output_shape() -> None:
    assert MyModel(width=4)(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def test_epoch_contains_every_sample_once() -> None:
    data = MyData(batch_size=300, num_train=1000)
    data.setup("fit")
    sizes = [len(y) for X, y in data.train_dataloader()]
    assert sizes == [300, 300, 300, 100]


def test_fit_learns(tmp_path: Path) -> None:
    options = ["--trainer.accelerator=cpu", "--trainer.max_epochs=2", "--wandb.mode=disabled"]
    line = [sys.executable, "-m", "my_project", "fit", *options, f"--run_dir={tmp_path}"]
    out = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True, timeout=300).stdout
    accuracy = float(out.rpartition("test acc: ")[2].partition(",")[0])
    assert accuracy > 0.5  # guessing gives 0.1
