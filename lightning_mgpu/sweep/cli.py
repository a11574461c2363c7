"""`python -m lightning_mgpu sweep`: many fits from one YAML; no account, no server.

python -m lightning_mgpu sweep --config sweep/lenet_lr.yaml
python -m lightning_mgpu sweep --config sweep/lenet_lr.yaml --count 4 --trainer.limit_train_batches=20
python -m lightning_mgpu sweep --config sweep/lenet_optimizer.yaml --sweep_dir sweeps/second --seed 1

Every other argument is one of `fit`, the same for all trials. Further `--config` files are those of `fit`.
The same command again goes on where the sweep was stopped. In a second terminal it takes a share of the trials.
"""

import argparse
import contextlib
import fcntl
import math
import os
import shlex
import shutil
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from lightning_mgpu.errors import ToolParser, UsageError

try:
    import optuna
except ImportError as error:
    raise UsageError("a sweep needs Optuna: pip install optuna") from error
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import Trial, TrialState

from lightning_mgpu.redact import redact, redact_arguments
from lightning_mgpu.sweep.plan import TRIAL, Plan, as_argument, read_plan
from lightning_mgpu.sweep.report import write_report
from lightning_mgpu.sweep.trial import metric_values, run, why_it_failed

MISTAKE = 2  # the exit status of `fit` for a mistake of the user's


def parser() -> argparse.ArgumentParser:
    description = (__doc__ or "").replace("`", "")
    result = ToolParser(
        prog="python -m lightning_mgpu sweep",
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
    sweep_dir = Path(os.path.expanduser(args.sweep_dir or Path("sweeps", plan.name)))
    fit = [*plan.fit, *(f"--config={config}" for config in args.config[1:]), *others]
    command = shlex.join(["python", "-m", "lightning_mgpu", "sweep", *redact_arguments(arguments)])
    sweep = Sweep(plan, fit, args.seed, sweep_dir, command)
    try:
        sweep.run()
    except (KeyboardInterrupt, SystemExit) as end:
        print("\ninterrupted: the same command goes on from here", flush=True)
        sys.exit(130 if isinstance(end, KeyboardInterrupt) else end.code)
    print(f"\n{sweep.report()}\nreport: {sweep_dir}/sweep.md, sweep.csv, sweep.png", flush=True)


class Sweep:
    """A sweep in its directory, where Optuna's journal holds what was asked and what came of it.

    Any number of processes may work on it. `sweep.lock` is held while a trial is chosen. A trial's log is locked by
    whoever can write to it, so a trial that is unfinished and whose log is free was interrupted.

    Args:
        fit: Arguments of `fit` for all trials.
        command: As it was given, for the report.

    Raises:
        UsageError: If the directory holds something else, or a sweep that was told something else.
    """

    def __init__(self, plan: Plan, fit: list[str], seed: int, sweep_dir: Path, command: str) -> None:
        self.plan, self.fit, self.seed, self.dir, self.command = plan, fit, seed, sweep_dir, command
        journal = sweep_dir / "sweep.journal"
        try:
            if not journal.exists() and sweep_dir.exists() and any(sweep_dir.iterdir()):
                raise UsageError(f"{sweep_dir} is no sweep's: name a new directory with --sweep_dir")
            sweep_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--sweep_dir={sweep_dir} cannot be made: {error.strerror}") from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        space = {name: str(distribution) for name, distribution in plan.space.items()}
        settings = {"method": plan.method, "metric": f"{plan.direction} {plan.metric}", "seed": seed}
        settings |= {"parameters": space, "arguments": redact_arguments(fit)}
        with locked(sweep_dir / "sweep.lock"):
            storage = JournalStorage(JournalFileBackend(str(journal)))
            options: dict[str, Any] = {"direction": plan.direction, "pruner": plan.pruner()}
            self.study = optuna.create_study(storage=storage, study_name="sweep", load_if_exists=True, **options)
            before = self.study.user_attrs.get("settings", settings)
            self.study.set_user_attr("settings", before)
        if different := [key for key, value in settings.items() if before[key] != value]:
            raise UsageError(
                f"{sweep_dir} holds a sweep of other {different[0]}: {before[different[0]]}; repeat the command that "
                "began it, or name a new directory with --sweep_dir"
            )

    def run(self) -> None:
        """Run trials until none is left to take."""
        print(f"{self.plan.num_trials} trials, in {self.dir}; Ctrl-C keeps what is done", flush=True)
        while (found := self.next_trial()) is not None:
            trial, log = found
            with log:
                self.run_trial(trial, log)
            self.report()

    def next_trial(self) -> tuple[Trial, IO[str]] | None:
        """An interrupted trial, or else a new one, and its log, locked for this process; none if all are taken."""
        with locked(self.dir / "sweep.lock"):
            trials = self.study.get_trials(deepcopy=False)
            for trial in trials:
                if trial.state == TrialState.RUNNING and (log := self._claim(trial.number)) is not None:
                    if trial.params.keys() == self.plan.space.keys():
                        return Trial(self.study, trial._trial_id), log
                    self.study.tell(trial.number, state=TrialState.FAIL)  # interrupted before its values were drawn
            waiting = [trial for trial in trials if trial.state == TrialState.WAITING]
            number = len(trials) - len(waiting)
            if number >= self.plan.num_trials:
                return None
            if not waiting:
                self.study.enqueue_trial(self.plan.point(number))
            self.study.sampler = self.plan.sampler(self.seed + number)  # trials are the same in any number of processes
            new = self.study.ask(self.plan.space)
            log = self._claim(new.number)
            assert log is not None
            return new, log

    def run_trial(self, trial: Trial, log: IO[str]) -> None:
        """Run a trial to its end, and tell Optuna.

        Raises:
            UsageError: If `fit` has taken the arguments of no trial so far, or does not log the metric.
        """
        run_dir = self.dir / f"trial_{trial.number:03}"
        given = [as_argument(option, trial.params[option]) for option in self.plan.space]  # --model before --model.lr
        print(f"trial {trial.number}: {' '.join(given)}", flush=True)
        if (run_dir / "checkpoints" / "last.ckpt").exists():
            arguments = [f"--resume={run_dir}"]
        else:
            shutil.rmtree(run_dir, ignore_errors=True)
            tracking = [f"--wandb.group={self.dir.name}", f"--wandb.name={self.dir.name}_{trial.number:03}"]
            is_trial = [] if TRIAL in self.fit else [TRIAL]  # a command for W&B's agent has it
            arguments = [*tracking, *self.fit, *given, f"--run_dir={run_dir}", *is_trial]
        before = self.study.get_trials(deepcopy=False)[trial.number].intermediate_values  # of an interrupted trial
        watched = Watched(trial, run_dir, self.plan.metric, num_reported=len(before))
        status = run(arguments, log, watched.is_hopeless)
        Path(log.name).write_text(output := redact(Path(log.name).read_text(errors="replace")))
        values = metric_values(run_dir, self.plan.metric)
        error = None
        if status and not watched.is_pruned:
            error = why_it_failed(output, status)
        elif not values:
            error = f"metric: name: {self.plan.metric}: no such metric is logged; correct it, with a new --sweep_dir"
        elif not math.isfinite(values[-1]):
            error = f"diverged: {self.plan.metric} is {values[-1]}"
        if error is not None:
            print(f"trial {trial.number}: failed: {error}", flush=True)
            self._fail(trial, error, is_mistake=status == MISTAKE)
            if not status and not values:
                raise UsageError(error)  # the other trials would not log the metric either
            return
        best = max(values) if self.plan.direction == "maximize" else min(values)
        self.study.tell(trial, **({"state": TrialState.PRUNED} if watched.is_pruned else {"values": best}))
        early = " (stopped early)" if watched.is_pruned else ""
        print(f"trial {trial.number}: {self.plan.metric} {best:.4f}{early}", flush=True)

    def _fail(self, trial: Trial, error: str, is_mistake: bool) -> None:
        """Tell Optuna, and end a sweep in which every trial was a mistake: it is in what all trials share."""
        trial.set_user_attr("error", error)
        trial.set_user_attr("is_mistake", is_mistake)
        self.study.tell(trial, state=TrialState.FAIL)
        if all(each.user_attrs.get("is_mistake") for each in self.study.get_trials(deepcopy=False)):
            shutil.rmtree(self.dir)  # the corrected command begins anew
            raise UsageError(error)

    def report(self) -> str:
        return write_report(self.plan, self.study, self.dir, self.command)

    def _claim(self, number: int) -> IO[str] | None:
        """A trial's log, locked until it is closed here and in the processes that write to it."""
        log = (self.dir / f"trial_{number:03}.log").open("a")
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.close()
            return None
        return log


class Watched:
    """Tells Optuna's pruner about a trial while it runs."""

    def __init__(self, trial: Trial, run_dir: Path, metric: str, num_reported: int) -> None:
        self.trial, self.run_dir, self.metric, self.num_reported = trial, run_dir, metric, num_reported
        self.is_pruned = False

    def is_hopeless(self) -> bool:
        values = metric_values(self.run_dir, self.metric)
        for epoch, value in list(enumerate(values, start=1))[self.num_reported :]:
            self.trial.report(value, epoch)
            self.is_pruned = self.is_pruned or self.trial.should_prune()
        self.num_reported = len(values)
        return self.is_pruned


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Within, no other process is in a block of the same file."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
