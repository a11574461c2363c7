"""A trained model as one file for other programs: ONNX, or torch's own exported program.

    python -m lightning_mgpu export --ckpt_path=runs/NAME/checkpoints/last.ckpt --output=model.onnx
    python -m lightning_mgpu export --ckpt_path=runs/NAME/checkpoints/last.ckpt --output=model.pt2

The file takes batches of any size. Before it is left there, its outputs are compared with the model's own.
"""

import argparse
import contextlib
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_mgpu.runs.checkpoint_file import read_checkpoint, saved_config
from lightning_mgpu.runs.errors import ToolParser, UsageError
from lightning_mgpu.runs.files import replacing

SIZES = (1, 3, 8)  # of the batches compared
TOLERANCE = 1e-4  # the largest difference allowed, relative to the largest output
BATCH = ({0: torch.export.Dim("batch")},)  # the first dimension may be of any size
Model = Callable[[Tensor], Tensor]


def main(args: list[str]) -> None:
    """Entry point of `python -m lightning_mgpu export`."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = ToolParser("python -m lightning_mgpu export", description=__doc__, formatter_class=formatter)
    parser.add_argument("--ckpt_path", required=True, help="the checkpoint")
    parser.add_argument("--output", type=Path, required=True, help="the file to write: *.onnx or *.pt2")
    options = parser.parse_args(args)
    if options.output.suffix not in WRITERS:
        raise UsageError(f"--output={options.output}: end the name in .onnx or .pt2, which says what to write")
    model = load_model(options.ckpt_path)
    try:
        difference = export(model, options.output)
    except Exception as error:  # whatever the exporters raise of a model they do not understand
        told = str(error).partition("\n")[0]
        raise UsageError(f"{type(model).__name__} cannot be written as {options.output}: {told}") from error
    compared = (
        f"largest difference from the model itself {difference:.1e}, over batches of {', '.join(map(str, SIZES))}"
    )
    print(f"{options.output}: {type(model).__name__}, batches of any size; {compared}")


def load_model(ckpt_path: str) -> LightningModule:
    """The model of a checkpoint, with its weights, in evaluation mode."""
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


def export(model: LightningModule, path: Path) -> float:
    """Write a model, read it back, and return the largest difference of outputs; a wrong file is not left there."""
    X = torch.randn(max(SIZES), *model.example_input_array.shape[1:])  # type: ignore[union-attr]
    # the exporters' remarks about themselves stay out of the output
    with replacing(path) as part, warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
        warnings.simplefilter("ignore")
        written = WRITERS[path.suffix](model, X, part)
        difference = float(torch.stack([(written(X[:size]) - model(X[:size])).abs().max() for size in SIZES]).max())
        if not difference <= TOLERANCE * max(1.0, float(model(X).abs().max())):  # NaN is not less
            raise ValueError(f"the file's outputs differ from the model's by {difference:.1e}")
    return difference


def write_exported_program(model: LightningModule, X: Tensor, path: Path) -> Model:
    """Torch's own format: `torch.export.load(path).module()(X)`."""
    torch.export.save(torch.export.export(model, (X,), dynamic_shapes=BATCH), path)
    return torch.export.load(path).module()


def write_onnx(model: LightningModule, X: Tensor, path: Path) -> Model:
    """ONNX with the input `X` and the output `logits`."""
    try:
        import onnxruntime
    except ImportError as error:
        raise UsageError(f"{error}: pip install 'lightning-mgpu[export]'") from error
    names: dict[str, Any] = {"input_names": ["X"], "output_names": ["logits"]}
    torch.onnx.export(model, (X,), path, **names, dynamo=True, dynamic_shapes=BATCH, external_data=False, verbose=False)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda X: torch.from_numpy(session.run(None, {"X": X.numpy()})[0])


WRITERS = {".onnx": write_onnx, ".pt2": write_exported_program}
