"""`fit --resume`: go on with a run in its own directory, as if it had never stopped.

    python -m lightning_mgpu fit --resume=runs/NAME
    python -m lightning_mgpu fit --resume=last --trainer.max_epochs=20

The run's `config.yaml` is the configuration. Beside `--resume` stand only flags that do not change what is computed, or
for how long.
"""

import contextlib
import fcntl
import os
import shlex
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn

from lightning_mgpu.arguments import given_options
from lightning_mgpu.checkpoint_io import LAST, PREVIOUS, read_checkpoint
from lightning_mgpu.errors import UsageError
from lightning_mgpu.files import PARTS
from lightning_mgpu.flatten import flatten
from lightning_mgpu.from_checkpoint import as_flag, shown
from lightning_mgpu.run_dir import RUN_DIR

FLAG = "--resume"
RUNS = Path("runs")
DEVICES = tuple(f"trainer.{name}" for name in ("accelerator", "strategy", "devices", "num_nodes"))
# how long, where and what is shown; a checkpoint goes on under any strategy and number of devices
MAY_CHANGE = (
    *(f"trainer.{name}" for name in ("max_epochs", "max_steps", "max_time", "min_epochs", "min_steps")),
    *(f"trainer.{name}" for name in ("accelerator", "strategy", "devices", "num_nodes", "enable_progress_bar")),
    *(f"trainer.{name}" for name in ("profiler", "limit_test_batches", "enable_model_summary", "plugins")),
    *(f"data.init_args.{name}" for name in ("root", "num_workers", "pin_memory")),
    *("checkpoint.last_every_n_minutes", "wandb", "no_wandb", "malloc", "traceback", "resume", "run_dir"),
)


def with_resumed_run(args: list[str]) -> list[str]:
    """The arguments with the run's configuration before all others, and `--resume` as the path of its directory.

    Raises:
        UsageError: If there is no such run, it has no configuration, or another checkpoint is named.
    """
    places = [i for i, arg in enumerate(args) if arg == FLAG or arg.startswith(f"{FLAG}=")]
    if not places:
        if name := given_options(args).get("resume"):
            raise UsageError(f"resume: {name} in a --config file: say {FLAG}={name} on the command line instead")
        return args
    if args[0] != "fit":
        raise UsageError(f"{FLAG} goes on with training: python -m lightning_mgpu fit {FLAG}=RUN_DIR")
    if any(arg.partition("=")[0] == "--ckpt_path" for arg in args):
        raise UsageError(f"{FLAG} takes the run's own checkpoint: leave --ckpt_path out")
    at = places[-1]
    rest = args[at + 1 :]
    if args[at] == FLAG:
        if not rest:
            raise UsageError(f"{FLAG}: name a run directory, or 'last'")
        name, rest = rest[0], rest[1:]
    else:
        name = args[at].partition("=")[2]
    run_dir = find_run(name)
    config = run_dir / "config.yaml"
    if not config.is_file():
        raise UsageError(f"{FLAG}={name}: {run_dir} is no run directory: it has no config.yaml")
    return ["fit", f"--config={config}", *args[1:at], f"{FLAG}={run_dir}", *rest]


def find_run(name: str) -> Path:
    """The run directory of this name; for `last` the one in `runs/` whose checkpoint is the newest.

    Processes that `ddp` started are told by the first one, in the environment.
    """
    if rank_zero_only.rank != 0 and RUN_DIR in os.environ:  # type: ignore[attr-defined]
        return Path(os.environ[RUN_DIR])
    if name != "last":
        if not (run_dir := Path(os.path.expanduser(name))).is_dir():
            raise UsageError(f"{FLAG}={name}: no such run directory{_known_runs()}")
        return run_dir
    saved = [path for path in RUNS.glob("*/checkpoints/*.ckpt") if path.name in (LAST, PREVIOUS)]
    if not saved:
        raise UsageError(f"{FLAG}=last: no run in {RUNS}/ has a checkpoint; name the directory of one")
    return max(saved, key=lambda path: path.stat().st_mtime).parents[1]


def choose_checkpoint(run_dir: Path, directory: str | None = None, max_epochs: int | None = None) -> Path:
    """The run's `last.ckpt`, or the previous one if the last is damaged.

    Args:
        directory: Of its checkpoints, if that is not in the run directory.
        max_epochs: How long to train in all.

    Raises:
        UsageError: If there is none that is whole, or the run has been trained for longer already.
    """
    checkpoints = Path(directory or run_dir / "checkpoints")
    damaged: list[Path] = []
    for path in (checkpoints / LAST, checkpoints / PREVIOUS):
        if not path.exists():
            continue
        checkpoint = read_checkpoint(path)
        if checkpoint is not None and "optimizer_states" not in checkpoint:
            raise UsageError(f"{FLAG}={run_dir}: {path} holds weights only, which cannot be trained on from")
        trained = None if checkpoint is None else _epochs(checkpoint)
        if checkpoint is not None and trained is not None:
            if max_epochs is not None and 0 <= max_epochs < trained:
                raise UsageError(f"--trainer.max_epochs={max_epochs}: {run_dir} has trained {trained} epochs already")
            if damaged:
                rank_zero_warn(f"{damaged[0]} is damaged: going on from {path.name}, saved before it.")
            if rank_zero_only.rank == 0:  # type: ignore[attr-defined]
                for torn in damaged:
                    torn.rename(torn.with_name(f"{torn.name}.damaged"))  # it must not become the previous one
                _remove_later(checkpoints, checkpoint["global_step"])
                for part in checkpoints.glob(PARTS):  # what a killed run was writing
                    part.unlink()
            return path
        damaged.append(path)
    why = f"{' and '.join(path.name for path in damaged)} damaged" if damaged else "none was saved before it stopped"
    raise UsageError(
        f"{FLAG}={run_dir}: it has no checkpoint to go on from ({why}); "
        f"start it again with: python -m lightning_mgpu fit --config {shlex.quote(str(run_dir / 'config.yaml'))}"
    )


def changes(run_dir: Path, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What the given flags change of the run's configuration, as 'trainer.max_epochs 10 -> 20'.

    Raises:
        UsageError: If something else than `MAY_CHANGE` is changed: it would be another run.
    """
    before, after = flatten(before), flatten(after)
    changed = []
    for key in sorted({*before, *after} - {"resume", "traceback", "config"}):
        old, new = before.get(key), after.get(key)
        if old == new:
            continue
        if after.get("scale_by_devices") and key.startswith(DEVICES):
            raise UsageError(
                f"{as_flag(key)}={shown(new)}: with --scale_by_devices=true other devices mean another batch and "
                f"learning rate than those {run_dir} was trained with ({shown(old)}): leave it out"
            )
        if not any(key == name or key.startswith(f"{name}.") for name in MAY_CHANGE) or key == "run_dir":
            raise UsageError(
                f"{as_flag(key)}={shown(new)} would make {run_dir} another run, it has {shown(old)}: leave it out, or "
                "start a new run from its checkpoint with --ckpt_path"
            )
        changed.append(f"{key} {shown(old)} -> {shown(new)}")
    return changed


def claim(run_dir: Path) -> int | None:
    """Lock the run directory for as long as this process lives; returns the lock.

    Raises:
        UsageError: If another process writes to it.
    """
    directory = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(directory)
        raise UsageError(f"{run_dir} is still running in another process: stop that one first") from None
    except OSError:  # a network file system without locks
        os.close(directory)
        return None
    return directory


def how_to_resume(run_dir: Path) -> str:
    """The command that goes on with a run, to be pasted into a shell."""
    return f"python -m lightning_mgpu fit {FLAG}={shlex.quote(str(run_dir))}"


def _epochs(checkpoint: dict[str, Any]) -> int | None:
    """How many epochs a checkpoint's run has trained; None if it does not say, and cannot be gone on with."""
    try:
        return int(checkpoint["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"])
    except (KeyError, TypeError, ValueError):
        return None


def _remove_later(checkpoints: Path, global_step: int) -> None:
    """Remove checkpoints of best epochs that lie ahead of where the run goes on: they will be saved again."""
    for path in checkpoints.glob("*step=*.ckpt"):
        step = path.stem.partition("step=")[2].partition("-")[0]
        if step.isdigit() and int(step) > global_step:
            path.unlink()


def _known_runs() -> str:
    with contextlib.suppress(OSError):
        if configs := list(RUNS.glob("*/config.yaml")):
            return f"; the newest here is {max(configs, key=lambda path: path.stat().st_mtime).parent}"
    return ""
