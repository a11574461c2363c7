"""The best checkpoint, checkpoints from elsewhere and their models; export; the last lines."""

import csv
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from lightning_mgpu.cli import export
from lightning_mgpu.models import LeNet
from lightning_mgpu.runs.record import fingerprint
from tests.runs.conftest import assert_same, last, metrics


def test_a_runs_directory(run: Path, run_files: set[str]) -> None:
    """The model logs a metric of its own in validation: the best is still that of val_acc."""
    assert {path.name for path in run.iterdir()} == run_files
    assert {path.name for path in (run / "checkpoints").glob("[!e]*")} == {"last.ckpt"}
    values = {int(row["epoch"]): float(row["val_acc"]) for row in metrics(run) if row["val_acc"]}
    (best,) = (run / "checkpoints").glob("epoch=*.ckpt")
    assert best.name.startswith(f"epoch={max(values, key=lambda epoch: (values[epoch], -epoch))}-")
    assert any(row.get("lr-SGD") for row in metrics(run))


def test_the_best_is_tested_and_the_last_has_the_fingerprint(
    fit: Callable[..., int], tmp_path: Path, capfd: Any, recwarn: pytest.WarningsRecorder
) -> None:
    """A run that diverges after its first epoch: 'best' is not 'last'."""
    rates = ("--model.lr_scheduler.step_size=3", "--model.lr_scheduler.gamma=1e6")
    assert fit("--trainer.devices=1", *rates, "--run_dir=a") == 0
    out = capfd.readouterr().out.splitlines()
    (best,) = (tmp_path / "a" / "checkpoints").glob("epoch=[012]-*.ckpt")
    (row,) = [row for row in metrics(tmp_path / "a") if row["test_acc"]]
    assert "testing the last epoch" not in "".join(out)
    assert out[-1].startswith(f"test acc: {float(row['test_acc']):.2f}, ")
    weights = last(tmp_path / "a")["state_dict"]
    assert out[-2] == f"fingerprint: {fingerprint(list(weights.values()))}"
    weights_of_best = torch.load(best, map_location="cpu", weights_only=True)["state_dict"]
    assert not torch.equal(weights["net.1.bias"], weights_of_best["net.1.bias"])
    assert not [
        warning for warning in recwarn if "before the ``update`` method" in str(warning.message)
    ]


SWA = (
    "StochasticWeightAveraging --trainer.callbacks.swa_lrs=0.1 "
    "--trainer.callbacks.swa_epoch_start=1"
)
EMA = "EMAWeightAveraging"


@pytest.mark.parametrize(
    "options", ["--model=own_run.Ends", f"--trainer.callbacks={SWA}", f"--trainer.callbacks={EMA}"]
)
def test_weights_set_when_training_ends_are_in_the_last(
    options: str, fit: Callable[..., int], tmp_path: Path, capfd: Any
) -> None:
    """The fingerprint is of weights that a checkpoint has, and the finished run has it again."""
    args = ("--trainer.devices=1", "--trainer.max_epochs=2", "--run_dir=a", *options.split())
    assert fit(*args) == 0
    printed = capfd.readouterr().out.splitlines()[-2]
    weights = last(tmp_path / "a")["state_dict"]
    assert printed == f"fingerprint: {fingerprint(list(weights.values()))}"
    assert fit("--resume=a") == 0
    assert capfd.readouterr().out.splitlines()[-2] == printed


FALLS = "--model=own_run.Falls --trainer.max_epochs=3 --model.name"
SUBDIRECTORY = "--checkpoint.filename=e{epoch}-{val/acc:.2f}"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("val_f1", "testing epoch 1: val_f1 1.0000 (largest)"),
        ("val_error", "testing epoch 3: val_error 0.8000 (smallest)"),
        ("val_quality --checkpoint.mode=min", "testing epoch 3: val_quality 0.8000 (smallest)"),
        ("val_quality", "Add --checkpoint.mode=max or --checkpoint.mode=min"),
        ("val_loss_x --model.as_object=true", "testing epoch 1: val_loss_x 1.0000 (largest)"),
        (f"val/acc {SUBDIRECTORY}", "testing epoch 1: val/acc 1.0000 (largest)"),
        (
            "val_f1 --checkpoint.filename=best --checkpoint.save_top_k=2",
            "testing epoch 1: val_f1 1.0000 (largest)",
        ),
    ],
)
def test_which_checkpoint_is_the_best(
    options: str, told: str, fit: Callable[..., int], capfd: Any
) -> None:
    """It is tested, before and after a resume; where nothing tells, no epoch is trained."""
    name, *others = options.split()
    falls = f"{FALLS}={name} --checkpoint.monitor={name}".split()
    status = fit("--trainer.devices=1", *falls, *others, "--run_dir=a")
    captured = capfd.readouterr()
    if status:
        assert told in captured.err and "epoch 1" not in captured.out
        return
    assert told in captured.out.splitlines()
    assert fit("--resume=a") == 0
    assert told in capfd.readouterr().out.splitlines()


def test_the_sanity_check_changes_nothing(
    fit: Callable[..., int], tmp_path: Path, capfd: Any
) -> None:
    """Lightning's two batches of validation before training: not a number, line or point more."""
    lines = []
    for num in (0, 2):
        args = (f"--trainer.num_sanity_val_steps={num}", "--trainer.max_epochs=2")
        assert fit("--trainer.devices=1", *args, f"--run_dir=run{num}") == 0
        out = capfd.readouterr().out.replace(f"run{num}", "run")
        lines.append([re.sub(r"[\d.]+ s\b|[\d.]+ sec", "", line) for line in out.splitlines()])
    assert lines[0] == lines[1]
    assert_same(tmp_path / "run0", tmp_path / "run2")


def test_the_test_set_does_not_choose_the_model(
    fit: Callable[..., int], tmp_path: Path, capfd: Any
) -> None:
    assert (
        fit("--trainer.devices=1", "--data.val_size=0", "--trainer.max_epochs=1", "--run_dir=a")
        == 0
    )
    assert "testing the last epoch" in capfd.readouterr().out
    assert [path.name for path in (tmp_path / "a" / "checkpoints").iterdir()] == ["last.ckpt"]


def test_evaluation_takes_a_checkpoint_alone(
    run: Path, main: Callable, root: Path, capfd: Any
) -> None:
    path = "--ckpt_path=run/checkpoints/last.ckpt"
    data = (f"--data.root={root}", "--trainer.accelerator=cpu", "--trainer.devices=1")
    assert main("test", path, *data, "--run_dir=tested", "--data.batch_size=9") == 0
    out = capfd.readouterr().out
    assert "Net, 12,730 parameters" in out and "batch:    9 global" in out
    assert "ckpt:     run/checkpoints/last.ckpt\n" in out
    assert main("predict", path, *data, "--run_dir=predicted") == 0
    assert len(list(csv.reader((run.parent / "predicted" / "predictions.csv").open()))) == 108
    assert main("test", path, "--seed_everything=5", "--print_config") == 0
    config = yaml.safe_load(capfd.readouterr().out)
    assert config["seed_everything"] == 5 and config["data"]["init_args"]["batch_size"] == 64
    assert config["data"]["init_args"]["root"] == "~/.cache/lightning_mgpu"
    assert main("validate", "--model=LeNet", path, *data) == 2
    assert "models.LeNet: run/checkpoints/last.ckpt has own_run.Net" in capfd.readouterr().err


def test_training_on_in_a_new_directory(run: Path, fit: Callable[..., int], capfd: Any) -> None:
    path = "--ckpt_path=run/checkpoints/last.ckpt"
    assert (
        fit(
            path,
            "--trainer.devices=1",
            "--trainer.max_epochs=3",
            "--run_dir=b",
            "--data.batch_size=32",
        )
        == 0
    )
    out = capfd.readouterr().out
    assert "epoch 3/3" in out and "epoch 2/3" not in out and "batch:    32 global" in out
    assert fit(path, "--trainer.devices=1", "--model.optimizer.lr=0.5", "--run_dir=c") == 2
    assert "--model.optimizer.lr=0.5: run/checkpoints/last.ckpt has 0.1" in capfd.readouterr().err


NUMPY = """
import numpy as np
from lightning.pytorch import Callback

class Numpy(Callback):
    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        checkpoint["mine"] = {"score": [np.float64(1.0)], "other": 1.0}
"""


@pytest.mark.parametrize("option", ["--checkpoint.save_last=true", "--checkpoint.save_last=false"])
def test_what_could_not_be_read_again_is_told_at_once(
    option: str, fit: Callable[..., int], own: Path, capfd: Any
) -> None:
    (own / "own_numpy.py").write_text(NUMPY)
    callback = "--trainer.callbacks=own_numpy.Numpy"
    assert fit("--trainer.devices=1", callback, option, "--run_dir=run") == 2
    out, err = capfd.readouterr()
    assert "\nmine.score: numpy" in err and "mine.other" not in err
    assert "epoch 2/" not in out and not (own / "run" / "checkpoints" / "last.ckpt").exists()


class Pwned:
    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("code of a checkpoint runs",)


def test_a_checkpoint_that_cannot_be_used_is_told(
    run: Path, fit: Callable[..., int], capfd: Any
) -> None:
    path = run / "checkpoints" / "last.ckpt"
    good, before = path.read_bytes(), metrics(run)
    content = last(run)
    for torn in (good[:-7], good[:900], b""):
        path.write_bytes(torn)
        assert fit("--resume=run") == 2
        assert "last.ckpt cannot be read: it is damaged" in capfd.readouterr().err
    torch.save({**content, "hyper_parameters": Pwned()}, path)
    assert fit("--resume=run") == 2
    captured = capfd.readouterr()
    assert (
        "it holds objects of classes" in captured.err and "code of a checkpoint" not in captured.out
    )
    assert metrics(run) == before


EVIL = """
import sys
from lightning_mgpu.models import LeNet

print("code runs", file=sys.stderr)

class Net(LeNet):
    pass
"""


@pytest.mark.parametrize("where", ["init_args", "dict_kwargs", "init_args.root"])
def test_what_a_checkpoint_may_say(
    where: str, own: Path, main: Callable[..., int], monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """A checkpoint sets no path on this machine, and names foreign classes before they run."""
    (own / "evil.py").write_text(EVIL)
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    data: dict[str, Any] = {"class_path": "lightning_mgpu.data.FashionMNIST"}
    data["init_args"] = {"batch_size": 9}
    data |= {where: "/else"} if "." in where else {where: {"root": "/else", "batch_size": 9}}
    model = {"class_path": "lightning_mgpu.models.LeNet"}
    for said in ({"class_path": "evil.Net"}, model | {"init_args": {"optimizer": "[evil.SGD]"}}):
        config = {"model": said, "data": data, "run_dir": "/else", "data.root": "/else"}
        content = {"state_dict": LeNet().state_dict(), "lightning_mgpu": {"config": config}}
        torch.save(content, "x.ckpt")
        status = main("test", "--ckpt_path=x.ckpt", "--print_config")
        out, err = capfd.readouterr()
        assert status == (0 if said["class_path"] == "evil.Net" else 2), err
        told = r"x.ckpt names classes of other files, which run when they are imported: evil.\w+\n"
        assert re.match(told, err)
        assert "/else" not in out and err.count("x.ckpt names") == 1
        if not status:
            assert err.splitlines()[1] == "code runs" and "batch_size: 9" in out


LACKS_ONNX = not all(find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
ONNX = pytest.param(
    ".onnx", marks=pytest.mark.skipif(LACKS_ONNX, reason="needs the extra 'export'")
)


@pytest.mark.parametrize("suffix", [".pt2", ONNX])
def test_export(suffix: str, tmp_path: Path, main: Callable, capfd: Any) -> None:
    model = {"class_path": "lightning_mgpu.models.LeNet", "init_args": {"num_classes": 7}}
    lenet = LeNet(num_classes=7).eval()
    torch.save(
        {"state_dict": lenet.state_dict(), "lightning_mgpu": {"config": {"model": model}}},
        tmp_path / "x.ckpt",
    )
    output = tmp_path / f"model{suffix}"
    assert main("export", "--ckpt_path=x.ckpt", f"--output={output}") == 0
    assert capfd.readouterr().out == f"{output}: LeNet, batches of any size\n"
    X = torch.rand(5, 1, 28, 28)  # a size that was not tried
    if suffix == ".pt2":
        found = torch.export.load(output).module()(X)
    else:
        import onnxruntime

        found = torch.from_numpy(
            onnxruntime.InferenceSession(output).run(None, {"X": X.numpy()})[0]
        )
    torch.testing.assert_close(found, lenet(X), rtol=1e-4, atol=1e-5)
    assert {path.name for path in tmp_path.iterdir()} == {"x.ckpt", output.name}


class OneSize(LeNet):
    def forward(self, X: Tensor) -> Tensor:
        return super().forward(X.reshape(3, 1, 28, 28))


@pytest.mark.parametrize("suffix", [".pt2", ONNX])
def test_a_model_that_takes_batches_of_one_size_is_refused(suffix: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="Constraints violated"):
        export.write_model(OneSize(), tmp_path / f"model{suffix}")


def test_a_loss_that_is_not_finite_at_the_end_is_a_warning(
    fit: Callable[..., int], capfd: Any
) -> None:
    assert fit("--trainer.devices=1", "--model.optimizer.lr=1e30", "--trainer.max_epochs=1") == 0
    out = capfd.readouterr().out
    assert "\nwarning: " in out and "the training has diverged, see metrics.csv\n" in out
