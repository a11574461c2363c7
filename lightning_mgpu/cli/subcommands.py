"""The subcommands by name. One whose room of the package was deleted is not offered."""

from importlib.util import find_spec

RUNS = ("fit", "validate", "test", "predict")  # the LightningCLI's
TOOLS = {  # the modules whose `main` the others are
    "export": "lightning_mgpu.runs.export",
    "sweep": "lightning_mgpu.sweep.cli",  # room: sweep
    "benchmark": "lightning_mgpu.benchmark.cli",  # room: benchmark
    "new": "lightning_mgpu.cli.new",  # room: new
}


def tools() -> dict[str, str]:
    """The tools that are there."""
    return {name: module for name, module in TOOLS.items() if find_spec(module.rpartition(".")[0])}


def subcommands() -> tuple[str, ...]:
    return (*RUNS, *tools())
