"""The book's exercise: with k devices take k times the batch and k times the learning rate (Goyal et al., 2017).

    --scale_by_devices=true

The configuration keeps what was given, so that a resumed or repeated run multiplies once; checkpoints do, too, and
`fit --ckpt_path` multiplies by what their run did.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jsonargparse import Namespace

from lightning_mgpu.checks import check_devices
from lightning_mgpu.clusters import num_devices
from lightning_mgpu.errors import UsageError
from lightning_mgpu.from_checkpoint import scaled_by

BATCH = "data.init_args.batch_size"
RATES = ("model.init_args.optimizer.init_args.lr", "model.init_args.lr_scheduler.init_args.max_lr")


def check_scale(path: str | None, scaled: dict[str, Any]) -> None:
    """Compare what is multiplied by here with what it was in the run of a checkpoint, whose optimizer keeps its rate.

    Raises:
        UsageError: If they differ.
    """
    k, before = scaled.get("scaled_by", 1), scaled_by(Path(path)) if path else None
    if before not in (None, k):
        raise UsageError(
            f"--ckpt_path={path}: its run multiplied batch and learning rate by {before}, this one would by {k}, and "
            "the optimizer goes on with the rate it has: take the same --scale_by_devices and as many devices"
        )


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
    check_devices(config.trainer)
    k = num_devices(config.trainer) * config.trainer.num_nodes
    given = {key: value for key in (BATCH, *RATES) if isinstance(value := config.get(key), (int, float))}
    for key in (BATCH, RATES[0]):
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
