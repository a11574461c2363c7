"""`fit --resume`: continue a run in its directory, as if it had not been interrupted."""

from pathlib import Path
from typing import Any

from lightning_mgpu.runs.checkpoints import END, KEY, read_checkpoint
from lightning_mgpu.runs.directory import flatten, read_run_json
from lightning_mgpu.seeds import VERSION
from lightning_mgpu.tools import LAST, UsageError

MAY_CHANGE = (
    *("trainer.max_", "trainer.min_", "trainer.enable_progress_bar.", "trainer.accelerator."),
    *("trainer.devices.", "trainer.num_nodes.", "trainer.strategy.", "trainer.logger."),
    *("wandb.", "output.", "data.root.", "data.num_workers.", "data.pin_memory."),
)


def check_unchanged(run_dir: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise a UsageError, with both values, if an option differs from the run to resume."""
    old, new = flatten(before), flatten(now)
    for key in dict.fromkeys([*new, *old]):
        if old.get(key) != new.get(key) and not f"{key}.".startswith(MAY_CHANGE):
            reason = f"must be {old.get(key)}, as in {run_dir}: remove the option"
            raise UsageError(f"--{key}={new.get(key)}: {reason}, or start a new run with --weights")


def find_last(run_dir: Path, config: dict, max_epochs: int | None) -> tuple[str | None, int]:
    """`last.ckpt` of a run and its number of steps; (None, 0) if the first epoch never ended."""
    path = run_dir / "checkpoints" / LAST
    if not path.exists():
        if flatten(config).get("trainer.enable_checkpointing") is False:
            raise UsageError(f"--resume={run_dir}: it saved no checkpoint (enable_checkpointing)")
        end = read_run_json(run_dir).get("end") or {}
        if end.get("epochs") and end.get("state") in ("finished", "stopped"):
            file = path.with_name(END)
            use = f"use `test --ckpt_path={file}` or `fit --weights={file}`"
            fix = use if file.exists() else "start a new run"
            raise UsageError(f"--resume={run_dir}: the run finished without a {LAST}: {fix}")
        return None, 0
    checkpoint = read_checkpoint(path)
    if checkpoint.get(KEY, {}).get("streams") != VERSION:
        raise UsageError(f"{path} is of a different version: use --weights={path}")
    loop = checkpoint["loops"]["fit_loop"]
    trained = loop["epoch_progress"]["current"]["processed"]
    num_steps = loop["epoch_loop.state_dict"]["_batches_that_stepped"]
    if max_epochs is not None and 0 <= max_epochs < trained:
        raise UsageError(f"--trainer.max_epochs={max_epochs}: {run_dir} has {trained} epochs")
    return str(path), num_steps
