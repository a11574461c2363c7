"""`fit --resume`: go on with a run in its own directory, as if it had never stopped.

    python -m lightning_mgpu fit --resume=last
    python -m lightning_mgpu fit --resume=runs/NAME --trainer.max_epochs=20

The run's `config.yaml` is the configuration. Only options in `MAY_CHANGE` may have other values.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import FSDPStrategy, Strategy

from lightning_mgpu.errors import UsageError
from lightning_mgpu.files import replace_text
from lightning_mgpu.runs.checkpoint_file import CHECKPOINT_KEY, LAST, flatten, read_checkpoint
from lightning_mgpu.seeds import VERSION

RESUME_FLAG = "--resume"
NEWEST = Path("runs", "newest")  # has the path of a run directory
OF_A_MACHINE = ("data.root.", "data.num_workers.", "data.pin_memory.", "malloc.")
# they print and draw (cli/training_cli.py): a broken one must not be the end of a run
CALLBACKS = (
    *("header.", "timer.", "lines.", "curve."),
    *("learning_rates.", "pictures.", "predictions."),
)
MAY_CHANGE = ("trainer.", "wandb.", "no_wandb.", "traceback.", *OF_A_MACHINE, *CALLBACKS)


def record_newest(trainer: Trainer) -> None:
    """Write where this run is, which may be anywhere: `last` is the newest, none other."""
    if trainer.is_global_zero and not trainer.fast_dev_run:  # type: ignore[attr-defined]
        with suppress(OSError):  # nothing may be written here
            NEWEST.parent.mkdir(exist_ok=True)
            replace_text(NEWEST, str(trainer.default_root_dir))


def find_run(name: str) -> Path:
    """The run directory of this name; for `last` the one that was started or saved last."""
    if name == "last" and not NEWEST.is_file():
        raise UsageError(f"{RESUME_FLAG}=last: no run was started here; name the directory of one")
    path = Path(NEWEST.read_text() if name == "last" else name)
    if not (path / "config.yaml").is_file():
        raise UsageError(f"{RESUME_FLAG}={path}: no run directory, which has a config.yaml")
    return path


def options_that_must_match(config: dict[str, Any]) -> dict[str, Any]:
    """Of a run's configuration, flat: with another value, the run would be another one."""
    return {
        key: value for key, value in flatten(config).items() if not f"{key}.".startswith(MAY_CHANGE)
    }


def choose_checkpoint(run_dir: Path, config: dict[str, Any], max_epochs: int | None) -> str | None:
    """The newest checkpoint; none if the run was stopped before its first epoch was over.

    Args:
        run_dir: The run directory.
        config: What its `config.yaml` says.
        max_epochs: How many epochs the run may train from now on, in all.

    Raises:
        UsageError: If no training can go on from the checkpoint, or none was to be saved.
    """
    # Lightning's, of a SLURM job
    saved = [*run_dir.glob(f"checkpoints/{LAST}"), *run_dir.glob("hpc_ckpt_*.ckpt")]
    if not saved:
        values = flatten(config)
        for option in ("checkpoint.save_last", "trainer.enable_checkpointing"):
            if values.get(option) is False:
                raise UsageError(
                    f"{RESUME_FLAG}={run_dir}: with --{option}=false it has saved no {LAST} to go "
                    f"on from; start again with --config={run_dir}/config.yaml"
                )
        return None
    path = max(saved, key=lambda path: path.stat().st_mtime)
    checkpoint = read_checkpoint(path, to_train_on=True)
    if checkpoint.get(CHECKPOINT_KEY, {}).get("streams") != VERSION:
        raise UsageError(
            f"{path} is of another version of this package, whose random numbers were others: "
            "start a new run from it with --ckpt_path"
        )
    # a callback may have added an epoch to those asked for, as SWA does for BatchNorm
    if max_epochs == checkpoint[CHECKPOINT_KEY].get("max_epochs"):
        return str(path)
    trained = checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
    if max_epochs is not None and 0 <= max_epochs < trained:
        raise UsageError(
            f"--trainer.max_epochs={max_epochs}: {run_dir} has trained {trained} epochs already"
        )
    return str(path)


def check_can_resume(strategy: Strategy, checkpoint: str | None) -> None:
    """Refuse optimizers without state: Lightning's `FSDPStrategy` raises an IndexError."""
    if checkpoint is None or not isinstance(strategy, FSDPStrategy):
        return
    if not all(states["state"] for states in read_checkpoint(checkpoint)["optimizer_states"]):
        raise UsageError(
            f"{checkpoint}: Lightning's FSDP cannot go on with an optimizer that has no state, "
            "such as SGD without momentum: go on with --trainer.strategy=ddp"
        )
