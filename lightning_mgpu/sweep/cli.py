"""`python -m lightning_mgpu sweep`: many fits from one YAML; no account, no server.

python -m lightning_mgpu sweep --config sweep/lenet_lr.yaml
python -m lightning_mgpu sweep --config sweep/lenet_lr.yaml --count 4 --trainer.limit_train_batches=20
python -m lightning_mgpu sweep --config sweep/lenet_optimizer.yaml --sweep_dir sweeps/second --seed 1

Every other argument is one of `fit`, the same for all trials. Further `--config` files are those of `fit`.
The same command again goes on where the sweep was stopped. In a second terminal it takes a share of the trials.
"""

import csv
import fcntl
import math
import shutil
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from filelock import FileLock

from lightning_mgpu.runs.errors import ToolParser, UsageError

try:
    import optuna
except ImportError as error:
    raise UsageError("a sweep needs Optuna: pip install optuna") from error
from optuna.samplers import RandomSampler, TPESampler
from optuna.storages.journal import JournalFileBackend
from optuna.trial import Trial, TrialState

from lightning_mgpu.runs.processes import run_in_group
from lightning_mgpu.runs.redact import redact, redact_arguments
from lightning_mgpu.sweep.plan import TRIAL, Plan, as_argument, read_plan
from lightning_mgpu.sweep.report import write_report

JOURNAL = "sweep.journal"  # Optuna's
MISTAKE = 2  # the exit status of `fit` for a mistake of the user's


def parser() -> ArgumentParser:
    description, formatter = (__doc__ or "").replace("`", ""), RawDescriptionHelpFormatter
    prog = "python -m lightning_mgpu sweep"
    result = ToolParser(prog, description=description, formatter_class=formatter, allow_abbrev=False)
    result.add_argument("--config", action="append", required=True, help="the sweep's YAML, here or in configs/")
    result.add_argument("--count", type=int, help="trials in all; goes before the YAML's run_cap")
    result.add_argument("--seed", type=int, default=0, help="of the draws; that of training is --seed_everything")
    result.add_argument("--sweep_dir", type=Path, help="where trials and results go; sweeps/NAME if left out")
    return result


def main(arguments: Sequence[str]) -> None:
    """Entry point of `sweep`.

    Raises:
        UsageError: For arguments that make no sense, before any trial is run.
    """
    args, others = parser().parse_known_args(arguments)
    plan = read_plan(args.config[0], args.count)
    for name in (argument.removeprefix("--").partition("=")[0] for argument in others):
        if name in (*plan.space, "run_dir", "resume", "trainer.fast_dev_run"):
            raise UsageError(f"--{name}: the sweep sets it for every trial; leave it out")
    fit = [*plan.fit, *(f"--config={config}" for config in args.config[1:]), *others]
    sweep = Sweep(plan, fit, args.seed, Path(args.sweep_dir or Path("sweeps", plan.name)).expanduser())
    print(f"{plan.num_trials} trials, in {sweep.dir}; Ctrl-C stops, the same command goes on", flush=True)
    while (found := sweep.next_trial()) is not None:
        with found[1]:
            sweep.run_trial(*found)
        sweep.report()
    print(f"\n{sweep.report()}\nreport: {sweep.dir}/sweep.md, sweep.csv, sweep.png", flush=True)


class Sweep:
    """A sweep in its directory, on which any number of processes may work.

    `lock` is held while a trial is chosen. A trial's log is locked by whoever can write to it. So a trial that is
    unfinished and whose log is free was interrupted.

    Raises:
        UsageError: If the directory holds something else, or a sweep that was told something else.
    """

    def __init__(self, plan: Plan, fit: list[str], seed: int, sweep_dir: Path) -> None:
        self.plan, self.fit, self.seed, self.dir = plan, fit, seed, sweep_dir
        if not (sweep_dir / JOURNAL).exists() and sweep_dir.exists() and any(sweep_dir.iterdir()):
            raise UsageError(f"{sweep_dir} is no sweep's: name a new directory with --sweep_dir")
        try:
            sweep_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--sweep_dir={sweep_dir} cannot be made: {error.strerror}") from error
        settings = {**plan.asked, "arguments": redact_arguments(fit), "seed": seed}
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        storage = optuna.storages.JournalStorage(JournalFileBackend(str(sweep_dir / JOURNAL)))
        self.lock = FileLock(sweep_dir / "sweep.lock")
        with self.lock:
            self.study = optuna.create_study(
                study_name="sweep", storage=storage, direction=plan.direction, load_if_exists=True
            )
            before = self.study.user_attrs.get("settings", settings)
            self.study.set_user_attr("settings", before)
        if others := [key for key, value in settings.items() if before[key] != value]:
            raise UsageError(
                f"{sweep_dir} holds a sweep of other {others[0]}: {before[others[0]]}; repeat the command that began "
                "it, or name a new directory with --sweep_dir"
            )

    def next_trial(self) -> tuple[Trial, IO[str]] | None:
        """An interrupted trial, or else a new one, and its log, locked for this process; none if all are taken."""
        with self.lock:
            trials = self.study.get_trials()
            taken = [trial for trial in trials if trial.state != TrialState.WAITING]
            for trial in taken:
                if trial.state == TrialState.RUNNING and (log := self._claim(trial.number)) is not None:
                    return self._with_values(Trial(self.study, trial._trial_id)), log
            if len(taken) >= self.plan.num_trials:
                return None
            if self.plan.points and len(trials) == len(taken):
                self.study.enqueue_trial(self.plan.points[len(taken)])
            new = self._with_values(self.study.ask())
            log = self._claim(new.number)
            assert log is not None
            return new, log

    def _with_values(self, trial: Trial) -> Trial:
        """Draw what the trial has not drawn yet, as `ask` does. The draws are the same in any number of processes."""
        seed, is_bayes = self.seed + trial.number, self.plan.method == "bayes"
        # the liar takes trials that run for bad ones, which keeps processes away from each other
        self.study.sampler = TPESampler(seed=seed, constant_liar=True) if is_bayes else RandomSampler(seed=seed)
        for name, distribution in self.plan.space.items():
            trial._suggest(name, distribution)
        return trial

    def run_trial(self, trial: Trial, log: IO[str]) -> None:
        """Run a trial to its end, and tell Optuna.

        Raises:
            UsageError: If the very first trial is a mistake, one in the YAML or the command line most likely.
        """
        run_dir = self.dir / f"trial_{trial.number:03}"
        given = [as_argument(option, trial.params[option]) for option in self.plan.space]  # --model before --model.lr
        print(f"trial {trial.number}: {' '.join(given)}", flush=True)
        if (run_dir / "checkpoints" / "last.ckpt").exists():
            arguments = [f"--resume={run_dir}"]
        else:
            shutil.rmtree(run_dir, ignore_errors=True)
            arguments = [f"--wandb.group={self.dir.name}", *self.fit, *given, f"--run_dir={run_dir}", TRIAL]
        # the process inherits the lock on its log, and keeps the lock if this one is killed
        status = run_in_group([sys.executable, "-m", "lightning_mgpu", "fit", *arguments], log)
        values = read_values(run_dir / "metrics.csv", self.plan.metric)
        if status != 0:
            error = f"status {status}: {last_words(Path(log.name))}"
        elif not values:
            error = f"metric: name: {self.plan.metric}: no such metric is logged"
        elif not math.isfinite(values[-1]):
            error = f"diverged: {self.plan.metric} is {values[-1]}"
        else:
            best = (max if self.plan.direction == "maximize" else min)(values)
            self.study.tell(trial, best)
            print(f"trial {trial.number}: {self.plan.metric} {best:.4f}", flush=True)
            return
        print(f"trial {trial.number}: failed: {error}", flush=True)
        trial.set_user_attr("note", error)
        self.study.tell(trial, state=TrialState.FAIL)
        if (status == MISTAKE or not values) and len(self.study.get_trials()) == 1:
            shutil.rmtree(self.dir)  # the corrected command begins anew
            raise UsageError(error)

    def report(self) -> str:
        """Write the table and the picture; returns the table."""
        with self.lock:
            return write_report(self.study, self.dir, self.plan.metric, list(self.plan.space))

    def _claim(self, number: int) -> IO[str] | None:
        """A trial's log, locked until it is closed here and in the processes that write to it."""
        log = (self.dir / f"trial_{number:03}.log").open("a")
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.close()
            return None
        return log


def read_values(path: Path, metric: str) -> list[float]:
    """A metric of a run, epoch by epoch, from its `metrics.csv`."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [float(row[metric]) for row in csv.DictReader(file) if row.get(metric)]


def last_words(log: Path) -> str:
    """What a log ends with: an `error: ` of a few lines, or a traceback, whose last line tells."""
    text = log.read_text(errors="replace").strip()
    told = text.rpartition("\nerror: " if "\nerror: " in f"\n{text}" else "\n")[2].removeprefix("error: ")
    return redact(" ".join(told.split()))
