"""The subcommands, and `--help`: the options people use first, on one screen, without a parser."""

from pathlib import Path

from lightning_mgpu import __version__
from lightning_mgpu.tools import command

TRAINER_SUBCOMMANDS = ("fit", "validate", "test", "predict")  # the LightningCLI's
TOOLS = {  # the functions that the others call with their arguments
    "sweep": "lightning_mgpu.sweep:sweep_command",
    "benchmark": "lightning_mgpu.lab.benchmark:benchmark_command",
    "runs": "lightning_mgpu.cli.list_runs:runs_command",
    "new": "lightning_mgpu.new_project.cli:new_command",
    "trace": "lightning_mgpu.lab.tracing.cli:trace_command",
    "network": "lightning_mgpu.lab.network.cli:network_command",
}
OPTIONS = {
    "--config FILE": "settings from a YAML file, here or in configs/; later files and flags win",
    "--model CLASS": "LeNet, ResNet18, or a path: my_package.MyModel",
    "--model.lr RATE": "the learning rate (LeNet: 0.2, ResNet18: 0.1)",
    "--model.optimizer CLASS": "SGD (default), AdamW, ...; its rate is --model.optimizer.lr",
    "--model.lr_scheduler CLASS": "none (default), OneCycle, or any of torch.optim.lr_scheduler",
    "--data.batch_size N": "the global batch, over all devices (default: 256)",
    "--data.val_size N": "validation images (default: 5000); 0: validate on the test set",
    "--trainer.max_epochs N": "how long to train",
    "--trainer.devices N": "GPUs, or processes on the CPU (default: auto)",
    "--trainer.strategy NAME": "auto (default), ddp, manual_allreduce, dp, ...",
    "--trainer.precision NAME": "32-true (default), 16-mixed, bf16-mixed, bf16-true, 64-true",
    "--seed_everything N": "of weights, batches and dropout, such as $RANDOM (default: 42)",
    "--run_dir DIR": "where the run's files go; left out: a new directory in runs/",
    "--resume DIR": "fit: go on with a run, as if it had never stopped; last: the newest one",
    "--weights FILE": "fit: start from the weights in a checkpoint, with any other settings",
    "--ckpt_path FILE": "validate, test, predict: the checkpoint, which knows its model",
    "--output.curve false": "no curve.png; and so with header, lines, pictures, test",
    "--help.all": "every option; --model.help, --data.help, --trainer.strategy.help=NAME: of one",
}
OVERVIEW = """\
usage: {prog} SUBCOMMAND [options]

    {prog} fit --trainer.devices=2
    {prog} fit --resume=last
    {prog} test --ckpt_path runs/NAME/checkpoints/last.ckpt

subcommands: {subcommands}; SUBCOMMAND --help shows the options of one
"""


def subcommands() -> tuple[str, ...]:
    """Subcommands whose file or directory of the package has not been deleted."""
    package = Path(__file__).parents[1]
    modules = {name: path.partition(":")[0].split(".")[1:] for name, path in TOOLS.items()}
    files = {name: package.joinpath(*parts).with_suffix(".py") for name, parts in modules.items()}
    return (*TRAINER_SUBCOMMANDS, *(name for name, file in files.items() if file.exists()))


def short_help(args: list[str]) -> str | None:
    """The text for these arguments; `None` if they ask for no help, or for a class's or all."""
    if args == ["--version"]:
        return f"{command()} {__version__}\n"
    if not args or args[0] in ("-h", "--help"):
        return OVERVIEW.format(prog=command(), subcommands=", ".join(subcommands()))
    if args[0] not in TRAINER_SUBCOMMANDS or not {"-h", "--help"} & {*args}:
        return None
    lines = [f"  {name:<32}{text}\n" for name, text in OPTIONS.items()]
    return "".join([f"usage: {command()} {args[0]} [options]\n\n", *lines])
