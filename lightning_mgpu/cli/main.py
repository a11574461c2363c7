"""From the command line to a subcommand, without messages of other packages that say nothing.

`restoring_process` puts back what a command changes in its process.
"""

import importlib
import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_mgpu.cli.error_messages import TRACEBACK_FLAG, did_you_mean, one_line_errors
from lightning_mgpu.cli.help import TOOLS, TRAINER_SUBCOMMANDS, short_help, subcommands
from lightning_mgpu.cli.run_trainer import run_trainer
from lightning_mgpu.errors import UsageError
from lightning_mgpu.project import PACKAGE, PACKAGE_ENV

# Deprecations in torch and Lightning, advice that does not fit data in memory: nothing to act on.
WARNINGS = (
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # Lightning 2.6 on torch 2.15
    r"The '\w+_dataloader' does not have many workers",  # they are slower for batches from memory
    r"The number of training batches \(\d+\) is smaller than the logging interval",  # epochs are
    r"(Checkpoint|Experiment logs) directory .* exists and is not empty",  # of a resumed run
    r"Couldn't infer the batch indices fetched from your dataloader",  # they are in its order
    r"Precision .* is not supported by the model summary",  # of its size in memory, not shown
    r"GPU available but not used",  # of a run on the CPU that was asked for
    r"\s*Unable to serialize instance",  # see parser.py
)
# How the lines begin that say what the run header says better, or praise other products.
INFO = (
    *("GPU available: ", "TPU available: ", "💡 Tip: ", "Seed set to "),
    *(
        "Initializing distributed: ",
        "----------",
        "distributed_backend=",
        "All distributed processes registered",
    ),
    *("`Trainer.fit` stopped: `max_", "`Trainer(limit_", "Loading `train_dataloader` to estimate"),
    *("Restoring states from", "Restored all states from", "Loaded model weights from"),
    *("LOCAL_RANK: ", "Using bfloat16 Automatic", "Using 16bit Automatic"),
    "You are using a CUDA device (",  # with Tensor Cores: docs/measurements.md says what uses them
    "Finished batch size finder, will continue with full run",  # which it does not
    "`weights_only` was not set, defaulting to `False`.",  # Lightning's searches, of their own file
)


def main(package: str = PACKAGE) -> None:
    """Run the command line in `sys.argv`; `package` is that of a project that uses this one."""
    args = sys.argv[1:]
    with restoring_process(), one_line_errors(TRACEBACK_FLAG in args):
        os.environ[PACKAGE_ENV] = package
        refuse_undecodable(args)
        if text := short_help(args):
            print(text, end="")
            return
        hide_messages()
        sys.path.insert(0, os.getcwd())  # one's own models are found here, as by `python -m`
        subcommand, others = args[0], args[1:]
        if subcommand not in subcommands():
            hint = did_you_mean(subcommand, subcommands())
            names = ", ".join(subcommands())
            raise UsageError(f"no subcommand {subcommand!r}. {hint} There are {names}")
        if subcommand in TRAINER_SUBCOMMANDS:
            if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
                # Ctrl-C reaches all processes: the first one ends the others
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            run_trainer(subcommand, others)
        else:
            # as Ctrl-C, which leaves no process behind
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            module, _, function = TOOLS[subcommand].rpartition(".")
            tool = getattr(importlib.import_module(module), function)
            tool([argument for argument in others if argument != TRACEBACK_FLAG])


def refuse_undecodable(args: list[str]) -> None:
    """Refuse bytes that are not UTF-8: config.yaml, run.json and checkpoints have every option."""
    for arg in args:
        try:
            arg.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"{arg!a}: it is not UTF-8") from error


@contextmanager
def restoring_process() -> Iterator[None]:
    """Put back, afterwards, what a command changes in its process.

    That is `sys.argv` and `sys.path`, the environment (such as PL_GLOBAL_SEED), the handlers of
    SIGINT and SIGTERM, warning filters, and filters of Lightning's loggers. The `mallopt` of
    `--malloc=keep` and torch's generators stay as they are.
    """
    argv, path, environment = sys.argv[:], sys.path[:], dict(os.environ)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    filters = {handler: handler.filters[:] for handler in lightning_log_handlers()}
    try:
        with warnings.catch_warnings():
            yield
    finally:
        sys.argv[:], sys.path[:] = argv, path
        os.environ.clear()
        os.environ.update(environment)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for log_handler, kept in filters.items():
            log_handler.filters[:] = kept


def hide_messages() -> None:
    """Filter the messages above, and no others."""
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    for handler in lightning_log_handlers():
        handler.addFilter(says_something)


def says_something(record: logging.LogRecord) -> bool:
    message = re.sub(r"^(\[rank: \d+\] |\s)*", "", record.getMessage())
    return not message.startswith(INFO)


def lightning_log_handlers() -> list[logging.Handler]:
    names = ("lightning.pytorch", "lightning.fabric")
    return [handler for name in names for handler in logging.getLogger(name).handlers]
