"""Weights & Biases that never asks, never waits and never stops a run.

    --wandb.project=fashion --wandb.name=first-try --wandb.tags='[lenet, book]'
    --wandb.mode=offline                 # record on disk; `wandb sync` later
    --wandb.watch=gradients              # histograms every 100 steps
    --no-wandb                           # or --wandb.mode=disabled

`auto`, the default, goes online where somebody is logged in and the server answers, else offline. Uploads happen in a
process of W&B's own; training hands it records and never waits for them.
"""

import atexit
import importlib.util
import json
import os
import secrets
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning_mgpu.errors import in_one_line
from lightning_mgpu.files import replace_text
from lightning_mgpu.flatten import flatten
from lightning_mgpu.redact import redact, redact_arguments
from lightning_mgpu.tracking.in_time import wait_for
from lightning_mgpu.tracking.server import choose_mode

if TYPE_CHECKING:
    from wandb import Run

PROJECT = "lightning-mgpu"
INIT_SECONDS = 8.0  # a server that answered may still take that long to make a run; then the run goes offline
TEARDOWN_SECONDS = 5.0  # for W&B's service to end, which now and then it does not
RUN_ID = "wandb/run_id"  # in the run directory: what a resumed run continues


@dataclass
class Tracking:
    """What Weights & Biases is told about a run; what is left out may stand in its own variables, as `WANDB_PROJECT`.

    Args:
        mode: `auto` goes online with a login and a server that answers, else offline. `WANDB_MODE` goes before `auto`.
        project: The project; created if there is none of this name. Left out: `lightning-mgpu`.
        name: Shown name of the run; the run directory's if left out.
        group: Runs of one group are shown together.
        tags: Labels to filter runs by.
        notes: A longer description.
        job_type: What the run does, to group by; the subcommand's name if left out.
        entity: Team or user the run belongs to.
        watch: Histograms to record while training: of the (reduced) `gradients`, the `parameters` or `all`.
        watch_freq: Optimizer steps from one histogram to the next.
        log_model: Upload the best checkpoint as an artifact when `fit` ends; needs to be online.
        finish_timeout: Seconds that the end of a run may wait for uploads; `wandb sync` uploads what is left.
    """

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    project: str | None = None
    name: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)
    notes: str | None = None
    job_type: str | None = None
    entity: str | None = None
    watch: Literal["gradients", "parameters", "all"] | None = None
    watch_freq: int = 100
    log_model: bool = False
    finish_timeout: float = 30.0

    def __post_init__(self) -> None:
        if self.watch_freq < 1:
            raise ValueError(f"--wandb.watch_freq={self.watch_freq}: take a number of optimizer steps from 1")
        if self.finish_timeout <= 0:
            raise ValueError(f"--wandb.finish_timeout={self.finish_timeout:g}: take a number of seconds above 0")
        if self.mode in ("online", "offline") and not is_installed():
            raise ValueError(f"--wandb.mode={self.mode}: wandb is not installed: pip install wandb, or use --no-wandb")


def is_installed() -> bool:
    """Whether wandb can be imported, without the half second that takes."""
    return importlib.util.find_spec("wandb") is not None


def saved_run_id(run_dir: Path) -> str | None:
    """The id of the W&B run that belongs to a run directory; `None` if it has none."""
    path = run_dir / RUN_ID
    return path.read_text().strip() if path.exists() else None


def start_run(tracking: Tracking, run_dir: Path, job_type: str, config: dict[str, Any]) -> tuple["Run | None", str]:
    """Start the one W&B run of a job, in its first process; continue the one that `run_dir` had before, if it had one.

    Returns:
        The run, `None` where tracking is disabled or cannot start, and a line that says where it is recorded and why.
    """
    try:
        return _start_run(tracking, run_dir, job_type, config)
    except Exception as error:  # a WANDB_BASE_URL that is none, say: whatever it is, it ends nothing
        return None, f"off ({type(error).__name__}: {in_one_line(error).partition(' For further information')[0]})"


def _start_run(tracking: Tracking, run_dir: Path, job_type: str, config: dict[str, Any]) -> tuple["Run | None", str]:
    # W&B reports on itself to the same server, and a process that ends waits ten seconds for that
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    can_run = tracking.mode == "disabled" or is_installed()
    mode, reason = choose_mode(tracking.mode) if can_run else ("disabled", "not installed: pip install wandb")
    if mode == "disabled":
        return None, f"off ({reason})"
    import wandb  # takes half a second, and is not installed everywhere

    environment = os.environ.get  # W&B's own variables, which `wandb agent` sets too, where nothing else is said
    run_id = saved_run_id(run_dir) or environment("WANDB_RUN_ID") or secrets.token_hex(4)

    def init(mode: str) -> "Run":
        with _redacted_arguments():  # wandb writes them down
            run = wandb.init(
                mode=mode,  # type: ignore[arg-type]
                project=tracking.project or environment("WANDB_PROJECT") or PROJECT,
                name=tracking.name or environment("WANDB_NAME") or run_dir.name,
                group=tracking.group,
                tags=tracking.tags or None,
                notes=tracking.notes,
                entity=tracking.entity,
                job_type=tracking.job_type or environment("WANDB_JOB_TYPE") or job_type,
                id=run_id,
                resume="allow",  # the first process with this id creates the run, later ones continue it
                dir=str(run_dir),
                config=flatten(config),
                settings=wandb.Settings(
                    silent=True,
                    console="off",
                    init_timeout=INIT_SECONDS,
                    finish_timeout=tracking.finish_timeout,
                    finish_timeout_raises=True,
                ),
            )
        replace_text(run_dir / RUN_ID, f"{run.id}\n")
        run.define_metric("trainer/global_step")
        run.define_metric("*", step_metric="trainer/global_step", step_sync=True)  # the axis of every chart
        return run

    if mode == "online":
        try:
            run = init("online")
            atexit.register(finish, run)  # before W&B's own, which would not say what is missing
            return run, f"online, {run.url}"
        except wandb.errors.Error as error:  # refused login, dead server: the run goes on without it
            reason = redact(f"{type(error).__name__}: {str(error).splitlines()[0]}")
            # Its service still holds the run's id; one that does not end is left to itself, a new one takes its place
            wait_for(wandb.teardown, TEARDOWN_SECONDS)
    run = init("offline")
    return run, f"offline ({reason}); upload it with: wandb sync {_offline_parts(run)}"


def save_file(run: "Run", path: Path, name: str) -> None:
    """Upload a file with the run, under a name that is none of W&B's own (`config.yaml` is)."""
    copy = shutil.copy(path, Path(run.dir, name))
    run.save(str(copy), base_path=run.dir, policy="now")


def finish(run: "Run") -> None:
    """End an online run; if not everything could be uploaded, say how to do it later."""
    atexit.unregister(finish)
    problem = None
    try:
        run.finish()
        if not run.offline and _has_upload_errors(Path(run.settings.log_internal)):
            problem = f"the server refused a part of the run (see {run.settings.log_internal})"
    except TimeoutError:
        seconds = f"{run.settings.finish_timeout:g} s (--wandb.finish_timeout)"
        problem = f"the server did not take everything within {seconds}"
    if problem:
        path = shlex.quote(str(Path(run.settings.sync_dir)))
        print(f"wandb:    {problem}; upload the rest with: wandb sync --include-online {path}", flush=True)


def _offline_parts(run: "Run") -> str:
    """What `wandb sync` is told to upload: all parts of a run that was resumed, in the order they were made."""
    path = Path(run.settings.sync_dir)
    parts = len(list(path.parent.glob("offline-run-*")))
    return shlex.quote(str(path)) if parts == 1 else f"{shlex.quote(str(path.parent))}/offline-run-*"


def _has_upload_errors(log: Path) -> bool:
    """W&B gives up on a server that answers 401 or the like without telling anybody but its log."""
    levels = (json.loads(line) for line in log.read_text().splitlines() if line.startswith("{"))
    return any(
        line["level"].startswith("ERROR") and not line["msg"].startswith(("api: ", "stream: ")) for line in levels
    )


@contextmanager
def _redacted_arguments() -> Iterator[None]:
    arguments, sys.argv = sys.argv, redact_arguments(sys.argv)
    try:
        yield
    finally:
        sys.argv = arguments
