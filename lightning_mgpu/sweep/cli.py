"""`python -m lightning_mgpu sweep`: many fits, one after the other; no account, no server.

python -m lightning_mgpu sweep --config sweep/lenet_lr.yaml
python -m lightning_mgpu sweep --config sweep/lenet_lr.yaml --count 4 --trainer.limit_train_batches=20
python -m lightning_mgpu sweep --config sweep/lenet_optimizer.yaml --sweep_dir sweeps/second --seed 1

Every other argument is one of `fit`, the same for all trials. Further `--config` files are those of `fit`.
The same command again goes on where it was stopped. `wandb sweep` takes the same YAML files.
"""

import argparse
import contextlib
import io
import json
import os
import shlex
import shutil
import sys
import time
from argparse import RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_mgpu.cli.arguments import prepare
from lightning_mgpu.cli.errors import ToolParser, UsageError
from lightning_mgpu.cli.lightning import CLI
from lightning_mgpu.runs.directory import claim
from lightning_mgpu.runs.files import replace_text
from lightning_mgpu.runs.redact import redact_arguments, redact_values
from lightning_mgpu.sweep.bayes import propose
from lightning_mgpu.sweep.plan import Plan, Values, as_argument, read_plan
from lightning_mgpu.sweep.report import Result, metric_of, ranked, write_report
from lightning_mgpu.sweep.trial import divergence, read_metrics, run_trial

PROG = "python -m lightning_mgpu sweep"


def parser() -> argparse.ArgumentParser:
    result = ToolParser(prog=PROG, description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    result.add_argument("--config", action="append", required=True, help="the sweep's YAML, here or in configs/")
    result.add_argument("--count", type=int, help="trials in all; goes before the YAML's run_cap")
    result.add_argument("--seed", type=int, default=0, help="of the draws; that of training is --seed_everything")
    result.add_argument("--sweep_dir", type=Path, help="where trials and results go; sweeps/NAME if left out")
    result.add_argument("--retry", action="store_true", help="run the trials that failed once more")
    return result


def main(arguments: Sequence[str]) -> None:
    """Entry point of `sweep`.

    Raises:
        UsageError: For arguments that make no sense, before any trial is run.
    """
    args, others = parser().parse_known_args(arguments)
    plan = read_plan(args.config[0], args.count)
    sweep_dir = Path(os.path.expanduser(args.sweep_dir or Path("sweeps", plan.name)))
    own = {parameter.name: "varied by the sweep" for parameter in plan.parameters}
    own["run_dir"] = "every trial has its own, in --sweep_dir"
    own["trainer.fast_dev_run"] = "such a trial leaves no results"
    for name in (argument.removeprefix("--").partition("=")[0] for argument in others):
        if name in own:
            raise UsageError(f"--{name}: {own[name]}; leave it out")
    fit = [*plan.arguments, *(f"--config={config}" for config in args.config[1:]), *others]
    command = shlex.join(["python", "-m", "lightning_mgpu", "sweep", *redact_arguments(arguments)])
    sweep = Sweep(plan, fit, args.seed, sweep_dir, command)
    lock = None
    try:
        sweep.check_arguments()  # before anything is made
        try:
            sweep_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--sweep_dir={sweep_dir} cannot be made: {error.strerror}") from error
        lock = claim(sweep_dir)
        sweep.load()  # once more: another process may have gone on until now
        if args.retry:
            sweep.results = [result for result in sweep.results if metric_of(plan, result) is not None]
        sweep.run()
    except (KeyboardInterrupt, SystemExit) as end:
        print(f"\ninterrupted: the same command goes on with trial {len(sweep.results)}\n")
        sweep.show()
        sys.exit(130 if isinstance(end, KeyboardInterrupt) else end.code)
    else:
        sweep.show()
    finally:
        if lock is not None:
            os.close(lock)


class Sweep:
    """A sweep in its directory: `sweep.json` holds what was asked and what came of it.

    Args:
        fit: Arguments of `fit` for all trials.
        command: As it was given, for the report.
    """

    def __init__(self, plan: Plan, fit: list[str], seed: int, sweep_dir: Path, command: str) -> None:
        self.plan, self.fit, self.seed, self.dir, self.command = plan, fit, seed, sweep_dir, command
        self.results: list[Result] = []
        # count and metric may differ from one command to the next
        parameters = {p.name: {"distribution": p.distribution, **p.options} for p in plan.parameters}
        settings = {"method": plan.method, "seed": seed, "arguments": redact_arguments(fit), "parameters": parameters}
        self.settings: dict[str, Any] = redact_values(json.loads(json.dumps(settings)))
        self.load()

    def load(self) -> None:
        """Take over what was found before.

        Raises:
            UsageError: If the directory holds something else, or a sweep that was told something else.
        """
        saved = self.dir / "sweep.json"
        if saved.exists():
            try:
                before = json.loads(saved.read_text())
                self.results = before["results"]
                different = [key for key in self.settings if before["settings"][key] != self.settings[key]]
            except (ValueError, KeyError, TypeError) as error:
                raise UsageError(f"{saved} cannot be read: {error}; name a new --sweep_dir") from error
            if different:
                raise UsageError(
                    f"{self.dir} holds a sweep of other {different[0]}: {before['settings'][different[0]]}; "
                    "name a new one with --sweep_dir, or repeat the command that began it"
                )
        elif self.dir.exists() and (self.dir.is_file() or any(self.dir.iterdir())):
            raise UsageError(f"{self.dir} exists and is no sweep's: name a new directory with --sweep_dir")

    def check_arguments(self) -> None:
        """Let `fit` parse the arguments of the first trials; wrong values of single trials are their own affair.

        Raises:
            UsageError: If it takes none of them: the mistake is in the names or in what all trials share.
        """
        mistakes: list[UsageError] = []
        for index in range(min(self.plan.num_trials or 1, 4)):
            try:
                arguments = prepare("fit", [*self.arguments(index, self.values(index)), "--print_config"])
                with contextlib.redirect_stdout(io.StringIO()):
                    CLI(["fit", *arguments])
            except SystemExit as end:
                if end.code:  # SIGTERM
                    raise
                return
            except UsageError as error:
                mistakes.append(error)
        raise mistakes[0]

    def values(self, index: int) -> Values:
        if self.plan.method != "bayes":
            return self.plan.trial(index, self.seed)
        before = sorted(self.results, key=lambda result: result["trial"])
        return propose(self.plan, index, self.seed, [(r["values"], metric_of(self.plan, r)) for r in before])

    def arguments(self, index: int, values: Values) -> list[str]:
        """Of `fit`, in the form the W&B agent gives the parameters in, but for null: it gives None, which is none."""
        wandb = [f"--wandb.group={self.dir.name}", f"--wandb.name={self.dir.name}_{index:03}"]
        return [*wandb, *self.fit, *(f"--{name}={as_argument(value)}" for name, value in values.items())]

    def run(self) -> None:
        """Run the trials that have no result yet.

        Raises:
            UsageError: If `fit` logs no such metric.
        """
        total = self.plan.num_trials or 0
        missing = [index for index in range(total) if index not in {result["trial"] for result in self.results}]
        for note in self.plan.notes:
            print(f"note: {note}")
        print(f"{len(missing)} of {total} trials to run, in {self.dir}; Ctrl-C keeps what is done", flush=True)
        self._save()  # an interrupted first trial leaves a sweep, too
        for num_done, index in enumerate(missing, start=1):
            values = self.values(index)
            varied = [f"{p.name}={as_argument(values[p.name])}" for p in self.plan.parameters if p.num_choices != 1]
            print(f"{index + 1}/{total}  {' '.join(varied)}  ", end="", flush=True)
            result = self._run(index, values)
            self.results.append(result)
            self._save()
            write_report(self.plan, self.results, self.dir, self.command)
            metric = metric_of(self.plan, result)
            if metric is None and not result["error"]:
                print()
                raise UsageError(
                    f"metric: name: {self.plan.metric}: no such metric is logged, but {', '.join(result['metrics'])}; "
                    "correct it in the sweep's YAML and repeat the command: what is done is kept"
                )
            found = f"failed: {result['error']}" if metric is None else f"{self.plan.metric} {metric:.4f}"
            mean = sum(each["seconds"] for each in self.results) / len(self.results)
            print(f"{found}  {result['seconds']:.0f} s{_left(mean * (len(missing) - num_done))}", flush=True)

    def _run(self, index: int, values: Values) -> Result:
        run_dir = self.dir / f"trial_{index:03}"
        _remove(run_dir)  # of a trial that was interrupted, or is tried again
        start = time.monotonic()
        log = self.dir / f"trial_{index:03}.log"
        error = run_trial([*self.arguments(index, values), f"--run_dir={run_dir}"], log)
        metrics = read_metrics(run_dir)
        error = error or divergence(metrics)
        logged = {} if error else {name: [value for _, value in points] for name, points in metrics.items() if points}
        extremes = {name: [min(seen), max(seen)] for name, seen in logged.items()}
        seconds = time.monotonic() - start
        return {"trial": index, "values": values, "seconds": seconds, "error": error, "metrics": extremes}

    def _save(self) -> None:
        saved = {"settings": self.settings, "results": self.results}
        replace_text(self.dir / "sweep.json", json.dumps(saved, indent=1))

    def show(self) -> None:
        """Print the table and the best trial."""
        if not self.results:
            return
        print("\n" + write_report(self.plan, self.results, self.dir, self.command))
        best = ranked(self.plan, self.results)[0]
        if metric_of(self.plan, best) is not None:
            print(f"best:   {self.dir / 'trial_{trial:03}'.format(**best)}")
        print(f"report: {self.dir / 'sweep.md'}, sweep.csv, sweep.png", flush=True)


def _remove(run_dir: Path) -> None:
    """Remove a directory that W&B's process of an interrupted trial may write to for some seconds more."""
    for _ in range(20):
        shutil.rmtree(run_dir, ignore_errors=True)
        time.sleep(0.5 if run_dir.exists() else 0)
        if not run_dir.exists():
            return
    raise UsageError(f"{run_dir} is still written to by another process: stop that one first")


def _left(seconds: float) -> str:
    if not seconds:
        return ""
    return f", about {seconds / 60:.0f} min left" if seconds >= 90 else f", about {seconds:.0f} s left"
