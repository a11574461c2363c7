"""One run, one directory: named at once, made when the data are there and no mistake was found."""

import contextlib
import fcntl
import os
import sys
import traceback
from datetime import datetime
from pathlib import Path

from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_mgpu.errors import UsageError

RUN_DIR_ENV = "LIGHTNING_MGPU_RUN_DIR"  # tells the processes that `ddp` starts where their run is

SHOWS = " shows where"  # ends the note on an exception that says which file has its traceback


def name_run_dir(config: Namespace) -> Path:
    """Where a new run will be: `--run_dir`, without files, or a name of time, model, strategy."""
    if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
        return Path(os.environ.get(RUN_DIR_ENV, "runs"))
    path = Path(config.run_dir or Path(config.trainer.default_root_dir or "runs", run_name(config)))
    if path.is_dir() and any(path.iterdir()):
        raise UsageError(
            f"--run_dir={path} exists and is not empty: name a new directory, one run has one"
        )
    return path


def run_name(config: Namespace) -> str:
    """When, what and how: `2026-11-21_09-30-00-123_LeNet_ddp_2`; milliseconds tell runs apart."""
    model = config.model.class_path.rpartition(".")[2]
    strategy, num_devices = resolve_auto(config.trainer)
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S-%f}"[:-3] + f"_{model}_{strategy}_{num_devices}"


def resolve_auto(options: Namespace) -> tuple[str, object]:
    """The strategy that a Trainer with these options uses, and on how many devices.

    The directory is named first, as the Trainer and its loggers are made with the name.
    """
    strategy, devices, name = options.strategy, options.devices, options.accelerator
    if not isinstance(strategy, str):
        several = strategy.get("init_args.parallel_devices")
        strategy = find_registered_name(strategy)
        if several:
            return strategy, len(several)
    if name in ("auto", "gpu"):
        gpus = (each for each in ("cuda", "mps") if AcceleratorRegistry.get(each).is_available())
        name = next(gpus, "cpu")
    try:
        accelerator = AcceleratorRegistry.get(name)
        devices = accelerator.auto_device_count() if devices == "auto" else devices
        devices = len(accelerator.get_parallel_devices(accelerator.parse_devices(devices)))
        devices *= options.num_nodes
    except Exception:  # the Trainer says what is wrong, or has an accelerator of the user's own
        return strategy, devices
    if strategy == "auto":
        strategy = "ddp" if devices > 1 else "single_device"
    return strategy, devices


def find_registered_name(options: Namespace) -> str:
    """The name of a class with these arguments, or of the class alone; else the class's own."""
    module, _, class_name = options.class_path.rpartition(".")
    strategy = getattr(sys.modules.get(module), class_name, None)  # nothing is imported here
    entries = {name: StrategyRegistry[name] for name in StrategyRegistry.available_strategies()}
    init_params = {
        name: {key: getattr(value, "__name__", value) for key, value in each["init_params"].items()}
        for name, each in entries.items()
        if each["strategy"] is strategy
    }
    arguments = options.get("init_args") or Namespace()
    given = {key: str(value).rpartition(".")[2] for key, value in vars(arguments).items()}
    exact = [name for name, params in init_params.items() if params.items() <= given.items()]
    return [*exact, *init_params, class_name][0]


def lock_run_dir(run_dir: Path) -> int:
    """Make a run directory if need be, and lock it; closing the descriptor returned frees it."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"{error.strerror}; choose another with --run_dir"
        raise UsageError(f"the run directory {run_dir} cannot be made: {reason}") from error
    directory = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(directory)
        raise UsageError(
            f"{run_dir} is still running in another process: stop that one first"
        ) from None
    except OSError:
        pass  # a network file system without locks
    return directory


def log_error(run_dir: Path, error: BaseException | None) -> None:
    """Write the traceback of what ends a run to `error.log`; but Ctrl-C says how to go on."""
    if isinstance(error, Exception):
        path = run_dir / "error.log"
        with contextlib.suppress(OSError):  # the disk may be full
            path.write_text("".join(traceback.format_exception(error)))
            error.add_note(f"{path}{SHOWS}")


def make_run_dir_on_rank_zero(trainer: Trainer) -> Path | None:
    """Where callbacks write, created; `None` but in the first process, and in a `fast_dev_run`.

    `trainer.log_dir` is a broadcast, which waits for ever if only one process asks for it.
    """
    if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return None
    directory = Path(trainer.default_root_dir)
    directory.mkdir(parents=True, exist_ok=True)
    return directory
