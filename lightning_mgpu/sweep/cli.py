"""`python -m lightning_mgpu sweep`: many fits from one YAML; no account, no server.

python -m lightning_mgpu sweep --config sweep/lenet_lr.yaml
python -m lightning_mgpu sweep --config sweep/lenet_lr.yaml --count 4 --trainer.limit_train_batches=20
python -m lightning_mgpu sweep --config sweep/lenet_optimizer.yaml --sweep_dir sweeps/second

Every other argument is one of `fit`, the same for all trials. Further `--config` files are those of `fit`.
The same command again goes on where the sweep was stopped. In a second terminal it takes a share of the trials.
"""

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

from lightning_mgpu.runs.errors import ToolParser, UsageError

try:
    from lightning_mgpu.sweep.plan import read_sweep
except ModuleNotFoundError as error:
    raise UsageError(f"a sweep needs Optuna: pip install optuna ({error})") from error


def parser() -> ArgumentParser:
    prog, formatter = "python -m lightning_mgpu sweep", RawDescriptionHelpFormatter
    result = ToolParser(prog, description=__doc__, formatter_class=formatter, allow_abbrev=False)
    result.add_argument("--config", action="append", required=True, help="the sweep's YAML, here or in configs/")
    result.add_argument("--count", type=int, help="trials in all; goes before the YAML's run_cap")
    result.add_argument("--sweep_dir", type=Path, help="where trials and results go; sweeps/YAML if left out")
    return result


def main(arguments: Sequence[str]) -> None:
    """Entry point of `sweep`.

    Raises:
        UsageError: For arguments that make no sense, before any trial is run.
    """
    args, others = parser().parse_known_args(arguments)
    more = [*(f"--config={config}" for config in args.config[1:]), *others]
    sweep = read_sweep(args.config[0], args.count, args.sweep_dir, more)
    for name in (argument.removeprefix("--").partition("=")[0] for argument in others):
        if name in (*sweep.space, "run_dir", "resume"):
            raise UsageError(f"--{name}: the sweep sets it for every trial; leave it out")
    sweep.open()
    print(f"{sweep.num_trials} trials, in {sweep.dir}; Ctrl-C stops, the same command goes on", flush=True)
    sweep.run()
    print(f"\n{sweep.write_report()}\nreport: {sweep.dir}/sweep.md, sweep.png", flush=True)
