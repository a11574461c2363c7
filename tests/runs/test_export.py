"""An exported model computes what the model computes, for batches of any size; what does not is not left there."""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_mgpu.models import LeNet
from lightning_mgpu.runs import export

LACKS_ONNX = not all(find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
ONNX = pytest.param(".onnx", marks=pytest.mark.skipif(LACKS_ONNX, reason="needs the extra 'export'"))


@pytest.mark.parametrize("suffix", [".pt2", ONNX])
def test_command(suffix: str, tmp_path: Path, main: Callable, capfd: Any) -> None:
    model = {"class_path": "lightning_mgpu.models.LeNet", "init_args": {"num_classes": 7}}
    lenet = LeNet(num_classes=7).eval()
    torch.save({"state_dict": lenet.state_dict(), "lightning_mgpu": {"config": {"model": model}}}, tmp_path / "x.ckpt")
    output = tmp_path / f"model{suffix}"
    assert main("export", "--ckpt_path=x.ckpt", f"--output={output}") == 0
    assert capfd.readouterr().out.startswith(f"{output}: LeNet, batches of any size; largest difference")
    X = torch.rand(5, 1, 28, 28)  # a size that was not tried
    if suffix == ".pt2":
        found = torch.export.load(output).module()(X)
    else:
        import onnxruntime

        found = torch.from_numpy(onnxruntime.InferenceSession(output).run(None, {"X": X.numpy()})[0])
    torch.testing.assert_close(found, lenet(X), rtol=1e-4, atol=1e-5)
    assert {path.name for path in tmp_path.iterdir()} == {"x.ckpt", output.name}


def test_a_wrong_file_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(model: nn.Module, X: Tensor, path: Path) -> Callable[[Tensor], Tensor]:
        path.touch()
        return lambda X: torch.full((len(X), 10), torch.nan)

    monkeypatch.setitem(export.WRITERS, ".pt2", wrong)
    with pytest.raises(ValueError, match=r"the file's outputs differ from the model's by nan"):
        export.export(LeNet().eval(), tmp_path / "model.pt2")
    assert list(tmp_path.iterdir()) == []
