"""The subcommands, and `--help`: the options people use first, on one screen, without a parser."""

from importlib.util import find_spec
from typing import Any

from lightning_mgpu import __version__
from lightning_mgpu.cli.yaml_files import read_default_config
from lightning_mgpu.project import command

TRAINER_SUBCOMMANDS = ("fit", "validate", "test", "predict")  # the LightningCLI's
TOOLS = {  # the functions that the others call with their arguments
    "export": "lightning_mgpu.cli.export.export_command",
    "sweep": "lightning_mgpu.sweep.cli.sweep_command",
    "benchmark": "lightning_mgpu.benchmark.cli.benchmark_command",
    "runs": "lightning_mgpu.cli.list_runs.runs_command",
    "new": "lightning_mgpu.new_project.cli.new_command",
}
OPTIONS = {
    "--config FILE": "settings from a YAML file, here or in configs/; later files and flags win",
    "--model CLASS": "LeNet, ResNet18, or a path: my_package.MyModel (default: {model})",
    "--model.optimizer CLASS": "SGD (default), AdamW, any of torch.optim, or a path",
    "--model.optimizer.lr RATE": "0.2 for LeNet, 0.1 for ResNet18, else the optimizer's own",
    "--model.lr_scheduler CLASS": "none (default), OneCycleLR, StepLR, "
    "any of torch.optim.lr_scheduler",
    "--data.batch_size N": "the global batch, over all devices (default: 256)",
    "--data.val_size N": "FashionMNIST's validation images; "
    "0: validate on the test set (default: 5000)",
    "--trainer.max_epochs N": "how long to train (default: {max_epochs})",
    "--trainer.devices N": "GPUs, or processes on the CPU (default: auto)",
    "--trainer.strategy NAME": "auto (default), ddp, manual_allreduce, dp, fsdp, ...",
    "--trainer.precision NAME": "32-true (default), 16-mixed, bf16-mixed, bf16-true, 64-true",
    "--seed_everything N": "seed of weights, batches, dropout (default: {seed}); false: a new one",
    "--run_dir DIR": "where the run's files go; left out: a new directory in runs/",
    "--resume DIR": "fit: go on with a run, as if it had never stopped; last: the newest one",
    "--ckpt_path FILE": "start from a checkpoint, which knows its model",
}
HELP_FLAGS = {
    "--curve, --header, --lines, ...": "what a run prints and draws; --curve=false: no curve",
    "--help.all": "every option",
    "--model.help, --data.help": "those of the model and the data module",
    "--trainer.strategy.help NAME": "those of a strategy",
}
OVERVIEW = """\
usage: {prog} SUBCOMMAND [options]

    {prog} fit --trainer.devices=2
    {prog} fit --config model/resnet18.yaml --trainer.limit_train_batches=10
    {prog} fit --resume=last
    {prog} test --ckpt_path runs/NAME/checkpoints/last.ckpt

subcommands: {subcommands}
SUBCOMMAND --help shows the options of one.
"""


def subcommands() -> tuple[str, ...]:
    """Those that are there: one whose directory of the package was deleted is not offered."""
    return (
        *TRAINER_SUBCOMMANDS,
        *(name for name, path in TOOLS.items() if find_spec(path.rsplit(".", 2)[0])),
    )


def short_help(args: list[str]) -> str | None:
    """The text for these arguments; `None` if they ask for no help, or for a class's or all."""
    if args == ["--version"]:
        return f"{command()} {__version__}\n"
    if not args or args[0] in ("-h", "--help"):
        return OVERVIEW.format(prog=command(), subcommands=", ".join(subcommands()))
    if args[0] not in TRAINER_SUBCOMMANDS or not {"-h", "--help"}.intersection(args[1:]):
        return None
    lines = [f"  {name:<32}{text}\n" for name, text in {**OPTIONS, **HELP_FLAGS}.items()]
    usage = f"usage: {command()} {args[0]} [options]\n\n"
    return usage + "".join(lines).format(**find_defaults())


def find_defaults() -> dict[str, Any]:
    """Those of `OPTIONS` that `configs/default.yaml` sets."""
    config = read_default_config()
    return {
        "model": config["model"]["class_path"].rpartition(".")[2],
        "max_epochs": config.get("trainer", {}).get("max_epochs"),
        "seed": config.get("seed_everything"),
    }
