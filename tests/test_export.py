"""An exported model computes what the model computes, for batches of any size; what does not is not left there."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning_mgpu.errors import UsageError
from torch import Tensor, nn

from lightning_mgpu import export
from lightning_mgpu.models import LeNet, ResNet18

ONNX = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")), reason="needs the extra 'export'"
)
WRITERS = [
    pytest.param(".pt2", export.write_exported_program, id="pt2"),
    pytest.param(".onnx", export.write_onnx, id="onnx", marks=ONNX),
]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "lenet.ckpt"
    model = {"class_path": "lightning_mgpu.models.LeNet", "init_args": {"num_classes": 7}}
    state = {"state_dict": LeNet(num_classes=7).state_dict(), "lightning_mgpu": {"config": {"model": model}}}
    torch.save(state, path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("suffix", "write"), WRITERS)
def test_command(
    suffix: str, write: Callable, checkpoint: Path, tmp_path: Path, main: Callable, capfd: pytest.CaptureFixture
) -> None:
    output = tmp_path / f"model{suffix}"
    assert main("export", f"--ckpt_path={checkpoint}", f"--output={output}") == 0
    out = capfd.readouterr().out
    assert out.startswith(f"{output}: LeNet, batches of any size; largest difference from the model itself ")
    assert out.count("\n") == 1
    model = export.load_model(str(checkpoint))
    X = torch.rand(5, 1, 28, 28)  # a size that was not tried
    if suffix == ".pt2":
        found = torch.export.load(output).module()(X)
    else:
        import onnxruntime

        found = torch.from_numpy(onnxruntime.InferenceSession(output).run(None, {"X": X.numpy()})[0])
    torch.testing.assert_close(found, model(X), rtol=1e-4, atol=1e-5)
    assert {path.name for path in tmp_path.iterdir()} == {"lenet.ckpt", output.name}


@pytest.mark.slow
@pytest.mark.parametrize(("suffix", "write"), WRITERS)
def test_resnet18(suffix: str, write: Callable, tmp_path: Path) -> None:
    model = ResNet18().eval()
    assert export.export(model, tmp_path / f"model{suffix}", write) < 1e-3


class Fixed(LightningModule):
    """Its output depends on something an exported graph does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.example_input_array = torch.zeros(1, 4)
        self.calls = 0

    def forward(self, X: Tensor) -> Tensor:
        self.calls += 1
        return self.net(X) * self.calls


def test_a_wrong_file_is_not_left_behind(tmp_path: Path) -> None:
    output = tmp_path / "model.pt2"
    output.write_text("what was there before")

    def wrong(model: LightningModule, X: Tensor, path: Path) -> Callable:
        path.write_text("wrong")
        return lambda X: model(X) + 0.1

    with pytest.raises(UsageError, match=r"not written, .* differs from the model by 1\.0e-01 for a batch of 1"):
        export.export(LeNet().eval(), output, wrong)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt2"]
    assert output.read_text() == "what was there before"
    with pytest.raises(UsageError):
        export.export(Fixed().eval(), output, export.write_exported_program)
    assert output.read_text() == "what was there before" and len(list(tmp_path.iterdir())) == 1


def test_home_directory(checkpoint: Path, tmp_path: Path, main: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    written: list[Path] = []
    monkeypatch.setattr(export, "export", lambda model, path, write: written.append(path) or 0.0)
    assert main("export", "--ckpt_path=~/lenet.ckpt", "--output=~/model.pt2") == 0
    assert written == [tmp_path / "model.pt2"]


MISTAKES = {
    "export": "export takes --ckpt_path=CHECKPOINT and --output=FILE.onnx or FILE.pt2",
    "export --ckpt=lenet.ckpt --out=a.pt2": "export takes --ckpt_path=CHECKPOINT and --output=FILE.onnx",
    "export --ckpt_path=nope.ckpt --output=a.pt2": "--ckpt_path=nope.ckpt: no such file",
    "export --ckpt_path=lenet.ckpt --output=a.txt": "--output=a.txt: end the name in .onnx or .pt2",
    "export --ckpt_path=lenet.ckpt --output=no/a.pt2": "there is no directory no",
    "export --ckpt_path=bare.ckpt --output=a.pt2": "does not say which model it is of",
    "export --ckpt_path=lenet.ckpt --output=a.pt2 --size=3": "export --size=3: no such option",
}


@pytest.mark.parametrize("args", MISTAKES)
def test_mistakes(args: str, checkpoint: Path, tmp_path: Path, main: Callable, capfd: pytest.CaptureFixture) -> None:
    torch.save({"state_dict": {}}, tmp_path / "bare.ckpt")
    assert main(*args.split()) == 2
    err = capfd.readouterr().err
    assert MISTAKES[args] in err and err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bare.ckpt", "lenet.ckpt"]
