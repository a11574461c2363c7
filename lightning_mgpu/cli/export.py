"""A trained model as one file for other programs: ONNX, or torch's own exported program.

    python -m lightning_mgpu export --ckpt_path=runs/NAME/checkpoints/last.ckpt --output=model.onnx
    python -m lightning_mgpu export --ckpt_path=runs/NAME/checkpoints/last.ckpt --output=model.pt2

The file takes batches of any size. ONNX has the input `X` and the output `logits`. The other one is
called by `torch.export.load("model.pt2").module()(X)`.
"""

from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_mgpu.commands import run_command
from lightning_mgpu.errors import UsageError
from lightning_mgpu.project import command
from lightning_mgpu.runs.checkpoint_file import read_checkpoint, saved_config


def export_command(args: list[str]) -> None:
    """Entry point of `python -m lightning_mgpu export`."""
    run_command(export, args, f"{command()} export", __doc__)


def export(ckpt_path: str, output: Path) -> None:
    """Write the model of a checkpoint to a file.

    Args:
        ckpt_path: The checkpoint.
        output: The file to write: *.onnx or *.pt2.
    """
    if output.suffix not in (".onnx", ".pt2"):
        raise UsageError(
            f"--output={output}: end the name in .onnx or .pt2, which says what to write"
        )
    model = load_model(ckpt_path)
    try:
        write_model(model, output)
    except Exception as error:  # whatever the exporters raise for a model they do not understand
        reason = str(error).partition("\n")[0]
        raise UsageError(
            f"{type(model).__name__} cannot be written as {output}: {reason}"
        ) from error
    print(f"{output}: {type(model).__name__}, batches of any size")


def load_model(ckpt_path: str) -> LightningModule:
    """The model of a checkpoint, with its weights, in evaluation mode."""
    checkpoint = read_checkpoint(ckpt_path)
    if (config := saved_config(checkpoint, ckpt_path).get("model")) is None:
        raise UsageError(
            f"--ckpt_path={ckpt_path} does not say which model it is of: it was made without this "
            "command"
        )
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningModule, "model")
    try:
        model: LightningModule = parser.instantiate(parser.parse_object({"model": config})).model
        model.load_state_dict(checkpoint["state_dict"])
    except Exception as error:
        raise UsageError(
            f"--ckpt_path={ckpt_path}: {str(error).splitlines()[-1].strip()}"
        ) from error
    if not isinstance(model.example_input_array, Tensor):
        raise UsageError(
            f"{type(model).__name__} has no example_input_array, which shows what it takes: set it"
        )
    return model.float().eval()


def write_model(model: LightningModule, path: Path) -> None:
    """Write the model to a file of the format that its suffix names."""
    # three samples: torch would take a batch of one for a fixed size
    X = torch.randn(3, *model.example_input_array.shape[1:])  # type: ignore[union-attr]
    # Raises if the batch can only have one size. torch.onnx.export of the model would write it.
    program = torch.export.export(model, (X,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    if path.suffix == ".pt2":
        torch.export.save(program, path)
    else:
        names: dict[str, Any] = {"input_names": ["X"], "output_names": ["logits"]}
        torch.onnx.export(program, (X,), path, **names, external_data=False, verbose=False)
