"""Many runs of one YAML, no account: `python -m lightning_mgpu sweep`. `wandb sweep` takes it too.

`cli.py` reads the YAML. `trials.py` chooses, runs and shows trials. `Trial` turns a `fit` into one.
"""

from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_mgpu.errors import UsageError
from lightning_mgpu.protocols import data_facts


class Trial(Callback):
    """Makes a run a trial, which does not look at the test set.

    Raises:
        UsageError: If the run would validate on the test set, so that the sweep would tune on it.
    """

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if data_facts(trainer).validates_on_test_set:
            raise UsageError(
                "a sweep that validates on the test set would tune on it: give --data.val_size=5000"
            )
        trainer.limit_test_batches = 0
