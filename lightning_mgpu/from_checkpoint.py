"""A checkpoint brings its configuration: model, data and seed need not be said again.

    python -m lightning_mgpu test --ckpt_path=runs/NAME/checkpoints/last.ckpt

Flags of the model that disagree with it are refused, for the checkpoint's weights and optimizer would win over them in
silence; flags of the data win, and are reported. So does how a model is evaluated.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch

from lightning_mgpu.arguments import given_options
from lightning_mgpu.checkpoint_io import KEY
from lightning_mgpu.config_file import SUBCOMMANDS
from lightning_mgpu.errors import UsageError
from lightning_mgpu.flatten import flatten

SECTIONS = ("seed_everything", "model", "data")
OF_A_MACHINE = ("root", "num_workers", "pin_memory")  # what a data module takes for the machine it runs on
OF_EVALUATION = ("model.init_args.flip_tta", "model.init_args.shift_tta")  # not of the weights: how they are used


def with_checkpoint_config(args: list[str]) -> list[str]:
    """The arguments with the checkpoint's configuration before all others, so that what is given goes before it."""
    if args[0] not in SUBCOMMANDS:
        return args
    given = given_options(args)
    path = Path(os.path.expanduser(str(given.get("ckpt_path"))))
    if given.get("resume") or not path.is_file():  # a run that is resumed may have begun with another's checkpoint
        return args
    config = saved_config(path)
    if args[0] == "fit" and (scaled_by(path) or 1) > 1:
        config["scale_by_devices"] = True
    return [args[0], f"--config={json.dumps(config, ensure_ascii=False)}", *args[1:]] if config else args


def saved_config(path: Path) -> dict[str, Any]:
    """The configuration in a checkpoint; empty for one that has none or cannot be read, which is told later.

    A checkpoint of Lightning's own callbacks has the model's hyperparameters alone.
    """
    try:
        checkpoint = _without_weights(path)
        config = dict(checkpoint.get(KEY, {}).get("config", {}))
        if not config and "_class_path" in (saved := dict(checkpoint.get("hyper_parameters", {}))):
            init_args = {name: value for name, value in saved.items() if not name.startswith("_")}
            config = {"model": {"class_path": saved["_class_path"], "init_args": init_args}}
    except Exception:
        return {}  # checks.check_checkpoint says what is wrong with it
    if data := config.get("data"):
        kept = {name: value for name, value in data.get("init_args", {}).items() if name not in OF_A_MACHINE}
        config["data"] = {**data, "init_args": kept}
    return config


def scaled_by(path: Path) -> int | None:
    """What a checkpoint's run multiplied batch and learning rate by (see `scale_k.py`); None if it does not say."""
    try:
        k = _without_weights(path)[KEY]["scaled_by"]
    except Exception:
        return None
    return k if isinstance(k, int) else None


def _without_weights(path: Path) -> Any:
    """What is in a checkpoint; its tensors stay on the disk until somebody looks at them, where the format allows."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except RuntimeError:  # torch's before 1.6
        return torch.load(path, map_location="cpu", weights_only=True)


def disagreements(path: str, config: dict[str, Any]) -> list[str]:
    """What given flags change of the checkpoint's data and seed, as 'data.batch_size 256 -> 64'.

    Args:
        config: The configuration that will run, flags included.

    Raises:
        UsageError: If a flag makes it another model than the checkpoint's.
    """
    saved, given = flatten(saved_config(Path(path))), flatten({name: config.get(name) for name in SECTIONS})
    different = [key for key, value in saved.items() if key in given and given[key] != value]
    different += [key for key in given if key not in saved and _is_new(key, given, saved)]
    different += [key for key in OF_EVALUATION if given.get(key) and key not in saved]  # options that came later
    for key in different:
        if key.startswith("model") and key not in OF_EVALUATION:
            raise UsageError(
                f"{as_flag(key)}={shown(given[key])} disagrees with {path}, which has {shown(saved.get(key))} and goes "
                "on with it, optimizer included: leave the flag out"
            )
    return [f"{key.replace('init_args.', '')} {shown(saved.get(key))} -> {shown(given[key])}" for key in different]


def as_flag(key: str) -> str:
    return f"--{key.replace('init_args.', '').removesuffix('.class_path')}"


def shown(value: Any) -> str:
    return "null" if value is None else str(value)


def _is_new(key: str, given: dict[str, Any], saved: dict[str, Any]) -> bool:
    """Whether a flag gave something to what was null: a scheduler, say."""
    parts = key.split(".")
    parents = [".".join(parts[:i]) for i in range(1, len(parts))]
    return given[key] is not None and any(parent in saved and saved[parent] is None for parent in parents)
