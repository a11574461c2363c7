"""A trained model as one file for other programs: ONNX, or torch's own exported program.

    python -m lightning_mgpu export --ckpt_path=runs/NAME/checkpoints/last.ckpt --output=model.onnx
    python -m lightning_mgpu export --ckpt_path=runs/NAME/checkpoints/last.ckpt --output=model.pt2

The file takes batches of any size. Before it is left there, its outputs are compared with the model's own.
"""

import argparse
import contextlib
import io
import os
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_mgpu.runs.checkpoint_file import read_checkpoint, saved_config
from lightning_mgpu.runs.errors import ToolParser, UsageError

SIZES = (1, 3, 8)  # of the batches compared
TOLERANCE = 1e-4  # the largest difference allowed, relative to the largest output
Model = Callable[[Tensor], Tensor]


def main(args: list[str]) -> None:
    """Entry point of `python -m lightning_mgpu export`."""
    parser = ToolParser(
        "python -m lightning_mgpu export",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--ckpt_path", type=os.path.expanduser, required=True, help="The checkpoint.")
    parser.add_argument("--output", type=os.path.expanduser, required=True, help="The file to write: *.onnx or *.pt2.")
    options = parser.parse_args(args)
    output = Path(options.output)
    writers = {".onnx": write_onnx, ".pt2": write_exported_program}
    if output.suffix not in writers:
        raise UsageError(f"--output={output}: end the name in .onnx or .pt2, which says what to write")
    model = load_model(options.ckpt_path)
    difference = export(model, output, writers[output.suffix])
    print(f"{output}: {type(model).__name__}, batches of any size; ", end="")
    print(f"largest difference from the model itself {difference:.1e}, over batches of {', '.join(map(str, SIZES))}")


def load_model(ckpt_path: str) -> LightningModule:
    """The model of a checkpoint, with its weights, in evaluation mode.

    Raises:
        UsageError: If the checkpoint does not know its model, or the model cannot be made.
    """
    checkpoint = read_checkpoint(ckpt_path)
    if (config := saved_config(checkpoint).get("model")) is None:
        raise UsageError(f"--ckpt_path={ckpt_path} does not say which model it is of: it was made without this command")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningModule, "model")
    try:
        model: LightningModule = parser.instantiate_classes(parser.parse_object({"model": config})).model
        model.load_state_dict(checkpoint["state_dict"])
    except Exception as error:
        raise UsageError(f"--ckpt_path={ckpt_path}: {str(error).splitlines()[-1].strip()}") from error
    if not isinstance(model.example_input_array, Tensor):
        raise UsageError(f"{type(model).__name__} has no example_input_array, which tells what it takes: set it")
    return model.float().eval()


def export(model: LightningModule, path: Path, write: Callable[[nn.Module, Tensor, Path], Model]) -> float:
    """Write a model, read it back and compare; the file is there only if it is right.

    Returns:
        The largest absolute difference of outputs.

    Raises:
        UsageError: If the model cannot be exported, or what was written computes something else.
    """
    name = type(model).__name__
    part = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        # the exporters' remarks about themselves stay out of the output
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            warnings.simplefilter("ignore")
            X = torch.randn(max(SIZES), *model.example_input_array.shape[1:])  # type: ignore[union-attr]
            written = write(Forward(model), X, part)
            differences = [float((written(X[:size]) - model(X[:size])).abs().max()) for size in SIZES]
            largest = max(1.0, float(model(X).abs().max()))
        if not all(difference <= TOLERANCE * largest for difference in differences):  # NaN is not less
            raise UsageError(f"the file's outputs differ from the model's by {max(differences):.1e}")
        os.replace(part, path)
    except Exception as error:  # whatever the exporters raise of a model they do not understand
        raise UsageError(f"{name} cannot be written as {path}: {str(error).splitlines()[0]}") from error
    finally:
        part.unlink(missing_ok=True)
    return max(differences)


def write_exported_program(model: nn.Module, X: Tensor, path: Path) -> Model:
    """Torch's own format: `torch.export.load(path).module()(X)`."""
    program = torch.export.export(model, (X,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, path)
    return torch.export.load(path).module()


def write_onnx(model: nn.Module, X: Tensor, path: Path) -> Model:
    """ONNX with the input `X` and the output `logits`."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise UsageError(f"ONNX needs {', '.join(missing)}: pip install 'lightning-mgpu[export]'")
    import onnxruntime

    torch.onnx.export(
        model,
        (X,),
        path,
        input_names=["X"],
        output_names=["logits"],
        dynamo=True,
        dynamic_shapes=({0: torch.export.Dim("batch")},),
        external_data=False,
        verbose=False,
    )
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda X: torch.from_numpy(session.run(None, {"X": X.numpy()})[0])


class Forward(nn.Module):
    """A LightningModule's forward pass and nothing else of it."""

    def __init__(self, model: LightningModule) -> None:
        super().__init__()
        self.model = model

    def forward(self, X: Tensor) -> Tensor:
        return self.model(X)
