"""A trained model as one file for other programs: ONNX, or torch's own exported program.

    python -m lightning_mgpu export --ckpt_path=runs/NAME/checkpoints/last.ckpt --output=model.onnx
    python -m lightning_mgpu export --ckpt_path=runs/NAME/checkpoints/last.ckpt --output=model.pt2

The file takes batches of any size. ONNX has the input `X` and the output `logits`. The other one is
called by `torch.export.load("model.pt2").module()(X)`.
"""

from pathlib import Path

import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule

from lightning_mgpu.cli.check_config import refuse_functions
from lightning_mgpu.cli.yaml_files import read_config
from lightning_mgpu.runs.checkpoints import read_checkpoint
from lightning_mgpu.runs.directory import config_beside
from lightning_mgpu.tools import make_parser, replacing


def export_command(args: list[str]) -> None:
    parser = make_parser("export", __doc__)
    parser.add_argument("--ckpt_path", type=Path, required=True, help="in its run directory")
    parser.add_argument("--output", type=Path, required=True, help="*.onnx or *.pt2")
    options = parser.parse_args(args)
    path, output = options.ckpt_path, options.output
    state_dict = read_checkpoint(path)["state_dict"]
    if (config := config_beside(path)) is None or output.suffix not in (".onnx", ".pt2"):
        parser.error("give a checkpoint in its run directory, and --output=*.onnx or *.pt2")
    model_parser = ArgumentParser(exit_on_error=False)
    model_parser.add_subclass_arguments(LightningModule, "model")
    model_config = model_parser.parse_object({"model": read_config(str(config))["model"]})
    refuse_functions(yaml.safe_load(model_parser.dump(model_config)))
    model: LightningModule = model_parser.instantiate(model_config).model
    model.configure_model()
    model.load_state_dict(state_dict)
    with replacing(output) as part:
        export(model.float().eval(), part)
    print(f"{output}: {type(model).__name__}, batches of any size")


def export(model: LightningModule, path: Path) -> None:
    """Write the model to a file, whose suffix says in which format."""
    if not isinstance(example := model.example_input_array, torch.Tensor):
        raise ValueError("set `self.example_input_array` to a tensor (1, ...) in the model")
    X = torch.cat([example[:1]] * 3)  # torch takes the size of a batch of one for a fixed one
    # raises if the batch can only have one size, where torch.onnx.export of the model does not
    program = torch.export.export(model, (X,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    if path.suffix == ".pt2":
        torch.export.save(program, path)
        return
    names = {"input_names": ["X"], "output_names": ["logits"]}
    onnx = torch.onnx.export(program, (X,), **names, verbose=False)  # type: ignore[arg-type]
    onnx.save(path)  # type: ignore[union-attr]
