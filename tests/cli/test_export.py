"""`export` writes the model of a run."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_mgpu.cli.export import export
from lightning_mgpu.models import LeNet


def test_export(main: Callable[..., int], root: Path) -> None:
    data = (f"--data.root={root}", "--data.val_size=101")
    one = ("--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.max_epochs=1")
    assert main("fit", *data, *one, "--run_dir=run", "--output.test=false") == 0
    line = ("export", "--ckpt_path=run/checkpoints/last.ckpt", "--output=model.pt2")
    assert main(*line) == 0
    model, X = LeNet().eval(), torch.randn(5, 1, 28, 28)
    model.load_state_dict(torch.load("run/checkpoints/last.ckpt")["state_dict"])
    torch.testing.assert_close(torch.export.load("model.pt2").module()(X), model(X))


def test_a_model_without_an_example(tmp_path: Path) -> None:
    model = LeNet().eval()
    model.example_input_array = None
    with pytest.raises(ValueError, match="example_input_array"):
        export(model, tmp_path / "model.pt2")
