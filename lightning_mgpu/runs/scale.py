"""The book's exercise: with k devices take k times the batch and k times the learning rate (Goyal et al., 2017).

    --scale_by_devices=true

The configuration keeps what was given, so that a resumed or repeated run multiplies once.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch.accelerators import AcceleratorRegistry, CUDAAccelerator
from lightning.pytorch.trainer.connectors.accelerator_connector import _select_auto_accelerator

from lightning_mgpu.runs.checkpoint_file import KEY, read_checkpoint
from lightning_mgpu.runs.errors import UsageError

BATCH = "data.init_args.batch_size"
RATE = "model.init_args.optimizer.init_args.lr"
MAX_RATE = "model.init_args.lr_scheduler.init_args.max_lr"


@contextlib.contextmanager
def scaled_by_devices(config: Namespace) -> Iterator[dict[str, Any]]:
    """Multiply global batch and learning rate in the configuration by the number of devices, until the end of `with`.

    Yields:
        What became of them, by name, to be shown and logged; nothing if `scale_by_devices` is not set.

    Raises:
        UsageError: If data or model have no such setting.
    """
    if not config.scale_by_devices:
        yield {}
        return
    k = num_devices(config.trainer) * config.trainer.num_nodes
    given = {key: value for key in (BATCH, RATE, MAX_RATE) if isinstance(value := config.get(key), (int, float))}
    for key in (BATCH, RATE):
        if key not in given:
            flag = key.replace("init_args.", "")
            raise UsageError(f"--scale_by_devices=true: --{flag} is not set, so there is nothing to multiply by {k}")
    for key, value in given.items():
        config[key] = value * k
    try:
        yield {"scaled_by": k, **{key.rpartition(".")[2]: value * k for key, value in given.items()}}
    finally:
        for key, value in given.items():
            config[key] = value


def check_scale(path: str, k: int) -> None:
    """Compare what is multiplied by here with what it was in the run of a checkpoint, whose optimizer keeps its rate.

    Raises:
        UsageError: If they differ.
    """
    before = read_checkpoint(path).get(KEY, {}).get("scaled_by", k)
    if before != k:
        raise UsageError(
            f"--ckpt_path={path}: its run multiplied batch and learning rate by {before}, this one would by {k}: take "
            "the same --scale_by_devices and as many devices"
        )


def num_devices(config: Namespace) -> int:
    """The devices of one machine, by the Trainer's `accelerator`, `devices` and `strategy`."""
    if not isinstance(config.strategy, str) and (own := config.strategy.get("init_args.parallel_devices")):
        return len(own)
    name = _select_auto_accelerator() if config.accelerator == "auto" else config.accelerator
    if name == "gpu":
        name = "cuda" if CUDAAccelerator.is_available() else "mps"
    accelerator = AcceleratorRegistry.get(name)
    devices = accelerator.auto_device_count() if config.devices == "auto" else config.devices
    return len(accelerator.get_parallel_devices(accelerator.parse_devices(devices)))
