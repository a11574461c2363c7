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
from torch import Tensor

from lightning_mgpu.checks import check_checkpoint
from lightning_mgpu.errors import UsageError, mistakes
from lightning_mgpu.from_checkpoint import saved_config

SIZES = (1, 3, 8)  # of the batches compared
TOLERANCE = 1e-4  # the largest difference allowed, relative to the largest output
Model = Callable[[Tensor], Tensor]


def main(args: list[str]) -> None:
    """Entry point of `python -m lightning_mgpu export`."""
    parser = argparse.ArgumentParser(
        "python -m lightning_mgpu export", exit_on_error=False, allow_abbrev=False, description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--ckpt_path", type=os.path.expanduser, help="The checkpoint.")
    parser.add_argument(
        "--output", type=lambda path: Path(os.path.expanduser(path)), help="The file to write: *.onnx or *.pt2."
    )
    options, unknown = parser.parse_known_args(args)
    if options.ckpt_path is None or options.output is None:
        raise UsageError("export takes --ckpt_path=CHECKPOINT and --output=FILE.onnx or FILE.pt2")
    if unknown:
        raise UsageError(f"export {unknown[0]}: no such option; it takes --ckpt_path and --output")
    check_checkpoint(options.ckpt_path, None)
    writers = {".onnx": write_onnx, ".pt2": write_exported_program}
    if options.output.suffix not in writers:
        raise UsageError(f"--output={options.output}: end the name in .onnx or .pt2, which says what to write")
    if not options.output.parent.is_dir():
        raise UsageError(f"--output={options.output}: there is no directory {options.output.parent}")
    model = load_model(options.ckpt_path)
    difference = export(model, options.output, writers[options.output.suffix])
    print(f"{options.output}: {type(model).__name__}, batches of any size; ", end="")
    print(f"largest difference from the model itself {difference:.1e}, over batches of {', '.join(map(str, SIZES))}")


def load_model(ckpt_path: str) -> LightningModule:
    """The model of a checkpoint, with its weights, in evaluation mode.

    Raises:
        UsageError: If the checkpoint does not know its model, or that cannot be made.
    """
    config = saved_config(Path(ckpt_path)).get("model")
    if config is None:
        raise UsageError(f"--ckpt_path={ckpt_path} does not say which model it is of: it was made without this command")
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LightningModule, "model")
    with mistakes(f"--ckpt_path={ckpt_path}"):
        model: LightningModule = parser.instantiate_classes(parser.parse_object({"model": config})).model
        model.load_state_dict(torch.load(ckpt_path, map_location="cpu", weights_only=True)["state_dict"])
    if not isinstance(model.example_input_array, Tensor):
        raise UsageError(f"{type(model).__name__} has no example_input_array, which tells what it takes: set it")
    return model.float().eval()


def export(model: LightningModule, path: Path, write: Callable[[LightningModule, Tensor, Path], Model]) -> float:
    """Write a model, read it back and compare; the file is there only if it is right.

    Returns:
        The largest absolute difference of outputs.

    Raises:
        UsageError: If the model cannot be exported, or what was written computes something else.
    """
    example = model.example_input_array
    assert isinstance(example, Tensor)
    generator = torch.Generator().manual_seed(0)
    part = path.with_name(f".{path.stem}.part{path.suffix}")
    try:
        with mistakes(f"{type(model).__name__} cannot be written as {path.suffix}"), _quiet():
            written = write(model, torch.randn(2, *example.shape[1:], generator=generator), part)
        worst = 0.0
        for size in SIZES:
            X = torch.randn(size, *example.shape[1:], generator=generator)
            with torch.no_grad():
                expected = model(X)
            with mistakes(f"{path.suffix} of {type(model).__name__}, a batch of {size}"), torch.no_grad():
                found = written(X)
            difference = float((found - expected).abs().max()) if found.shape == expected.shape else float("inf")
            if not difference <= TOLERANCE * max(1.0, float(expected.abs().max())):
                raise UsageError(
                    f"--output={path}: not written, for the exported {type(model).__name__} differs from the model by "
                    f"{difference:.1e} for a batch of {size}"
                )
            worst = max(worst, difference)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return worst


def write_exported_program(model: LightningModule, X: Tensor, path: Path) -> Model:
    """Torch's own format: `torch.export.load(path).module()(X)`."""
    with torch.no_grad():
        program = torch.export.export(Forward(model), (X,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(program, path)
    return torch.export.load(path).module()


def write_onnx(model: LightningModule, X: Tensor, path: Path) -> Model:
    """ONNX with the input `X` and the output `logits`.

    Raises:
        UsageError: If the packages for it are not installed.
    """
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise UsageError(f"--output=*.onnx needs {', '.join(missing)}: pip install 'lightning-mgpu[export]'")
    import onnxruntime

    batch = torch.export.Dim("batch")
    torch.onnx.export(
        Forward(model),
        (X,),
        path,
        input_names=["X"],
        output_names=["logits"],
        dynamo=True,
        dynamic_shapes=({0: batch},),
        external_data=False,
        verbose=False,
    )
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda X: torch.from_numpy(session.run(None, {"X": X.numpy()})[0])


class Forward(torch.nn.Module):
    """A LightningModule's forward pass and nothing else of it."""

    def __init__(self, model: LightningModule) -> None:
        super().__init__()
        self.model = model

    def forward(self, X: Tensor) -> Tensor:
        return self.model(X)


@contextlib.contextmanager
def _quiet():  # type: ignore[no-untyped-def]
    """The exporters' remarks about themselves stay out of the output."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
