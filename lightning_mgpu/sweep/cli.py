"""`python -m lightning_mgpu sweep`: many fits from one YAML; no account, no server.

python -m lightning_mgpu sweep --config sweep/lenet_lr.yaml
python -m lightning_mgpu sweep --config sweep/lenet_lr.yaml --count 4 --trainer.limit_train_batches=20
python -m lightning_mgpu sweep --config sweep/lenet_optimizer.yaml --sweep_dir sweeps/second --seed 1

Every other argument is one of `fit`, the same for all trials. Further `--config` files are those of `fit`.
The same command again goes on where the sweep was stopped. In a second terminal it takes a share of the trials.
"""

import fcntl
import math
import shutil
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from filelock import FileLock

from lightning_mgpu.cli.errors import ToolParser, UsageError

try:
    import optuna  # noqa: F401
except ImportError as error:
    raise UsageError("a sweep needs Optuna: pip install optuna") from error
from optuna.samplers import RandomSampler, TPESampler
from optuna.trial import Trial, TrialState

from lightning_mgpu.runs.processes import run_in_group
from lightning_mgpu.sweep.plan import TRIAL, Plan, as_argument, read_plan
from lightning_mgpu.sweep.report import write_report
from lightning_mgpu.sweep.trial import JOURNAL, STOPPED_EARLY, TRIAL_DIR, open_study

MISTAKE = 2  # the exit status of `fit` for a mistake of the user's


def parser() -> ArgumentParser:
    description = (__doc__ or "").replace("`", "")
    result = ToolParser(
        "python -m lightning_mgpu sweep",
        description=description,
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
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
        settings = {
            "method": plan.method,
            "metric": plan.metric,
            "goal": plan.direction,
            "early_terminate": plan.early_terminate,
            "parameters": {name: str(distribution) for name, distribution in plan.space.items()},
            "arguments": fit,
            "seed": seed,
        }
        self.lock = FileLock(sweep_dir / "sweep.lock")
        with self.lock:
            self.study = open_study(sweep_dir, plan.direction)
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
        run_dir = self._path(trial.number)
        given = [as_argument(option, trial.params[option]) for option in self.plan.space]  # --model before --model.lr
        print(f"trial {trial.number}: {' '.join(given)}", flush=True)
        if (run_dir / "checkpoints" / "last.ckpt").exists():
            arguments = [f"--resume={run_dir}"]
        else:
            shutil.rmtree(run_dir, ignore_errors=True)
            arguments = [f"--wandb.group={self.dir.name}", *self.fit, *given, f"--run_dir={run_dir}", TRIAL]
        # the process inherits the lock on its log, and keeps the lock if this one is killed
        status = run_in_group([sys.executable, "-m", "lightning_mgpu", "fit", *arguments], log)
        record = self.study.get_trials()[trial.number]
        values = list(record.intermediate_values.values())
        if error := self._error(status, values, Path(log.name)):
            self._fail(trial.number, error)
            if (status == MISTAKE or not values) and trial.number == 0 and len(self.study.get_trials()) == 1:
                shutil.rmtree(self.dir)  # the corrected command begins anew
                raise UsageError(error)
        elif "note" in record.user_attrs:
            self.study.tell(trial, state=TrialState.PRUNED)  # with the last value
            print(f"trial {trial.number}: {self.plan.metric} {values[-1]:.4f}, {STOPPED_EARLY}", flush=True)
        else:
            self.study.tell(trial, best := (max if self.plan.direction == "maximize" else min)(values))
            print(f"trial {trial.number}: {self.plan.metric} {best:.4f}", flush=True)

    def report(self) -> str:
        with self.lock:
            return write_report(self.study, self.dir, self.plan.metric, list(self.plan.space))

    def _error(self, status: int, values: list[float], log: Path) -> str:
        """Why a trial has failed, in one line; '' if it has not."""
        if status:  # the end of the log is an `error: ` in a few lines, or a traceback, whose last line tells
            text = log.read_text(errors="replace").strip()
            told = text.rpartition("\nerror: " if "\nerror: " in f"\n{text}" else "\n")[2].removeprefix("error: ")
            return f"status {status}: {' '.join(told.split())}"
        if not values:
            return f"metric: name: {self.plan.metric}: no such metric is logged"
        return "" if math.isfinite(values[-1]) else f"diverged: {self.plan.metric} is {values[-1]}"

    def _fail(self, number: int, error: str) -> None:
        print(f"trial {number}: failed: {error}", flush=True)
        Trial(self.study, self.study.get_trials()[number]._trial_id).set_user_attr("note", error)
        self.study.tell(number, state=TrialState.FAIL)

    def _path(self, number: int) -> Path:
        return self.dir / f"{TRIAL_DIR}{number:03}"

    def _claim(self, number: int) -> IO[str] | None:
        """A trial's log, locked until it is closed here and in the processes that write to it."""
        log = self._path(number).with_suffix(".log").open("a")
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.close()
            return None
        return log
