"""Every block of docs/cookbook.md, in its order, in one process and on the tiny dataset.

Only the limits of a short run are appended; two devices become one.
Torchvision's file of weights is one of random numbers.
"""

import csv
import importlib
import re
import runpy
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torchvision.models import ResNet18_Weights, resnet18
from torchvision.utils import save_image

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[1]
PAGE = (REPOSITORY / "docs" / "cookbook.md").read_text()
FILES = dict(re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", PAGE, flags=re.DOTALL))
LINES = [
    line
    for block in re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
    for line in block.splitlines()
]
LIMITS = [f"--trainer.limit_{stage}_batches=2" for stage in ("train", "val", "test")]
SHORT = ["--trainer.max_epochs=1", "--output.pictures=false"]
SHORTER = {  # the page names such crops, too
    "unfreeze_backbone_at_epoch: 2": "unfreeze_backbone_at_epoch: 1",
    "PRETRAINED.transforms()": "PRETRAINED.transforms(crop_size=64, resize_size=64)",
}
PRETRAINED = ResNet18_Weights.DEFAULT
ONE_DEVICE = ["--trainer.devices=1"]


@pytest.fixture
def kitchen(tmp_path, main, monkeypatch):
    for name, content in FILES.items():
        for long, short in SHORTER.items():
            content = content.replace(long, short)
        (tmp_path / name).write_text(content)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    (hub := tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    torch.save(resnet18().state_dict(), hub / Path(PRETRAINED.url).name)
    (tmp_path / "images").mkdir()
    for i in range(5):
        save_image(torch.rand(1, 28, 28), tmp_path / "images" / f"{i}.png")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_every_block_runs(kitchen, root, main, monkeypatch, capfd):
    outputs = []
    for line in LINES:
        _, *words = shlex.split(line)
        if words[0].endswith(".py"):
            monkeypatch.setattr(sys, "argv", words)
            runpy.run_path(str(kitchen / words[0]))
            outputs.append(capfd.readouterr().out)
            continue
        assert words[:2] == ["-m", "lightning_mgpu"]
        options = [*SHORT, *LIMITS] if words[2] == "fit" else []
        options += [] if words[2] == "runs" else ["--trainer.accelerator=cpu"]
        if "my_finetuning.yaml" in words:
            is_head = "--trainer.max_epochs=2" in words
            options += ["--data.batch_size=4", f"--trainer.max_epochs={1 if is_head else 2}"]
            options += ONE_DEVICE
        elif words[2] == "fit":
            options += [f"--data.root={root}", "--data.val_size=101"]
        if "--trainer.devices=2" in words:
            options += ONE_DEVICE
        assert main(*words[2:], *options) == 0, line
        outputs.append(capfd.readouterr().out)
    monkeypatch.setattr(sys, "argv", ["curves.py", "runs/first", "runs/weights"])  # of docs/runs.md
    defined = runpy.run_path(str(REPOSITORY / "scripts" / "curves.py"))
    assert [len(axes.lines) for axes in defined["figure"].axes] == [2, 2], "two metrics, two runs"

    rows = list(csv.DictReader((kitchen / "runs" / "folder" / "predictions.csv").open()))
    assert [row["file"] for row in rows] == [f"images/{i}.png" for i in range(5)]
    assert sum("model:    FineTuned" in out for out in outputs) == 3
    assert sum("testing epoch 1: val_f1" in out for out in outputs) >= 1
    pretrained = PRETRAINED.get_state_dict()
    for run, is_equal in (("head", True), ("weights", False), ("sampler", False)):
        path = kitchen / "runs" / run / "checkpoints" / "last.ckpt"
        weight = torch.load(path, weights_only=True)["state_dict"]["net.conv1.weight"]
        assert torch.equal(weight, pretrained["conv1.weight"]) == is_equal

    run_notebook(FILES["my_notebook.py"], root)
    check_exports()


def check_exports():
    """Batches of another size than the example; ONNX where it is installed."""
    exported = importlib.import_module("my_export")
    X = torch.rand(7, 1, 28, 28)
    probabilities = importlib.import_module("my_classify").classify(X)
    torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(7))
    torch.testing.assert_close(exported.loaded(X).softmax(dim=1), probabilities)
    if find_spec("onnxscript"):
        [line] = re.findall(r"`(model\.to_onnx\(.*?\))`", PAGE, flags=re.DOTALL)
        exec(line, vars(exported))
        assert Path("model.onnx").stat().st_size > 4 * 60_000, "LeNet's weights are in it"


def run_notebook(code, root):
    code = code.replace("max_epochs=1", "max_epochs=1, limit_train_batches=2")
    code = code.replace("batch_size=256", f"batch_size=256, root={str(root)!r}, val_size=101")
    namespace = {}
    exec(code, namespace)
    assert namespace["trainer"].strategy.shares == [1, 1]
