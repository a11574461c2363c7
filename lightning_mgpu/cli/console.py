"""Keeps these messages of other packages out of a run's output, and no others."""

import logging
import re
import warnings

# Deprecations inside torch and Lightning, and advice that does not fit data in memory: nothing the user can act on.
WARNINGS = (
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # Lightning 2.6 on torch 2.15
    r"The '\w+_dataloader' does not have many workers",  # workers are slower for batches gathered from memory
    r"The number of training batches \(\d+\) is smaller than the logging interval",  # the epoch's metrics are logged
    r"(Checkpoint|Experiment logs) directory .* exists and is not empty",  # of a resumed run, which goes on with both
    r"Couldn't infer the batch indices fetched from your dataloader",  # batches come in dataset order
)
# How the lines begin that say what the run header says better, or praise other products.
INFO = (
    *("GPU available: ", "TPU available: ", "💡 Tip: ", "Seed set to "),
    *("Initializing distributed: ", "----------", "distributed_backend=", "All distributed processes registered"),
    *("`Trainer.fit` stopped: `max_", "`Trainer(limit_", "Loading `train_dataloader` to estimate"),
    *("Restoring states from", "Restored all states from", "Loaded model weights from"),
    "Finished batch size finder, will continue with full run",  # which it does not
    "`weights_only` was not set, defaulting to `False`.",  # by Lightning's searches, of a file they have just written
)


def quieten() -> None:
    """Filter the messages above."""
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    for name in ("lightning.pytorch", "lightning.fabric"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(lambda record: not re.sub(r"^\[rank: \d+\] ", "", record.getMessage()).startswith(INFO))
