"""The subcommands, and `--help`: the most common options on one screen, without importing torch."""

from pathlib import Path

from lightning_mgpu import __version__
from lightning_mgpu.tools import command

TRAINER_SUBCOMMANDS = ("fit", "validate", "test", "predict")  # the LightningCLI's
TOOLS = {  # functions of the other subcommands; each is called with the arguments
    "sweep": "lightning_mgpu.sweep:sweep_command",
    "benchmark": "lightning_mgpu.lab.benchmark:benchmark_command",
    "runs": "lightning_mgpu.cli.list_runs:runs_command",
    "new": "lightning_mgpu.new_project.cli:new_command",
    "trace": "lightning_mgpu.lab.tracing.cli:trace_command",
    "network": "lightning_mgpu.lab.network.cli:network_command",
}
DESCRIPTIONS = {
    "fit": "Train a model, then test its best checkpoint",
    "validate": "Evaluate a checkpoint on the validation set",
    "test": "Evaluate a checkpoint on the test set",
    "predict": "Write the predictions of a checkpoint to predictions.csv",
    "sweep": "Search hyperparameters, one `fit` per trial",
    "benchmark": "Time training steps of strategies, models and options",
    "runs": "List runs with their options and metrics",
    "new": "Create a project that depends on this package",
    "trace": "Trace the messages of an allreduce",
    "network": "Train on emulated machines, and time the steps",
}
OPTIONS = {
    "--config FILE": "YAML file, also looked up in configs/; later files and flags override it",
    "--model CLASS": "model: LeNet (default), ResNet18, or a path: my_package.MyModel",
    "--model.lr RATE": "learning rate (default: 0.2 for LeNet, 0.1 for ResNet18)",
    "--model.optimizer CLASS": "optimizer (default: SGD); set its --model.optimizer.lr as well",
    "--model.lr_scheduler CLASS": "learning rate scheduler: OneCycle, StepLR, ... (default: none)",
    "--data.batch_size N": "global batch size, summed over all devices (default: 256)",
    "--data.val_size N": "number of validation images (default: 5000); 0: validate on the test set",
    "--trainer.max_epochs N": "number of epochs (default: 10)",
    "--trainer.devices N": "number of GPUs, or of processes on the CPU (default: auto)",
    "--trainer.strategy NAME": "strategy: ddp, manual_allreduce, dp, ... (default: auto)",
    "--trainer.precision NAME": "precision: 16-mixed, bf16-mixed, 64-true, ... (default: 32-true)",
    "--seed_everything N": "random seed (default: 42)",
    "--run_dir DIR": "directory of the run's files (default: a new one in runs/)",
    "--resume DIR": "fit: run to resume, or `last` for the newest one",
    "--weights FILE": "fit: checkpoint to initialize the model from (fine-tuning)",
    "--ckpt_path FILE": "validate, test, predict: checkpoint to evaluate, with its run's model",
    "--output.curve false": "disable curve.png; also: header, lines, pictures, test",
    "--help.all": "all options; of a class: --model.help, --data.help, --trainer.strategy.help=X",
}
OVERVIEW = """\
usage: {prog} SUBCOMMAND [options]

examples:
  {prog} fit --trainer.devices=2
  {prog} fit --resume=last
  {prog} test --ckpt_path runs/NAME/checkpoints/last.ckpt

subcommands:
{subcommands}
Run `{prog} SUBCOMMAND --help` for the options of a subcommand.
"""


def subcommands() -> tuple[str, ...]:
    """Subcommands whose file or directory has not been deleted from the package."""
    package = Path(__file__).parents[1]
    modules = {name: path.partition(":")[0].split(".")[1:] for name, path in TOOLS.items()}
    files = {name: package.joinpath(*parts).with_suffix(".py") for name, parts in modules.items()}
    return (*TRAINER_SUBCOMMANDS, *(name for name, file in files.items() if file.exists()))


def short_help(args: list[str]) -> str | None:
    """The help text for these arguments; `None` if there is none, or a parser prints it."""
    if args == ["--version"]:
        return f"{command()} {__version__}\n"
    if not args or args[0] in ("-h", "--help"):
        lines = [f"  {name:<12}{DESCRIPTIONS[name]}\n" for name in subcommands()]
        return OVERVIEW.format(prog=command(), subcommands="".join(lines))
    if args[0] not in TRAINER_SUBCOMMANDS or not {"-h", "--help"} & {*args}:
        return None
    lines = [f"  {name:<32}{text}\n" for name, text in OPTIONS.items()]
    usage = f"usage: {command()} {args[0]} [options]\n\n{DESCRIPTIONS[args[0]]}.\n\noptions:\n"
    return usage + "".join(lines)
