"""Private names of Lightning, jsonargparse, torch that the template needs. A release may move one.

Those of `strategies/` are in tests/strategies/test_private_names.py.
"""

import os
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import Trainer, callbacks, strategies
from lightning.pytorch.strategies.launchers import subprocess_script
from lightning.pytorch.utilities import exceptions
from lightning.pytorch.utilities.model_summary import ModelSummary
from torch import nn

import lightning_mgpu
from tests.private_names import private_names

PACKAGE = Path(lightning_mgpu.__file__).parent
LINEAR = nn.Linear(1, 1)
SGD = torch.optim.SGD(LINEAR.parameters(), 0.1)
FINDER = callbacks.BatchSizeFinder()
NAMES: dict[str, Any] = {  # who has it, outside of a run
    "_BatchNorm": nn.modules.batchnorm,
    "_SubprocessScriptLauncher": subprocess_script,
    "_TunerExitException": exceptions,
    "_call_impl": LINEAR,
    "_compiled_call_impl": LINEAR,
    "_dynamo": torch,
    "_enabled": callbacks.RichProgressBar(),
    "_exit": os,
    "_extract_stats": callbacks.LearningRateMonitor,
    "_foreach_add_": torch,
    "_foreach_copy_": torch,
    "_forward_example_input": ModelSummary,
    "_forward_pre_hooks": LINEAR,
    "_get_metric_interpolated_filepath_name": callbacks.ModelCheckpoint,
    "_get_train_description": callbacks.RichProgressBar,
    "_inductor": torch,
    "_init_val": FINDER,
    "_last_lr": torch.optim.lr_scheduler.ConstantLR(SGD),
    "_max_trials": FINDER,
    "_option_string_actions": ArgumentParser(),
    "_save_checkpoint": callbacks.ModelCheckpoint,
    "_should_skip_saving_checkpoint": callbacks.ModelCheckpoint,
    "_state_dict_type": strategies.FSDPStrategy(),
}
OF_A_TRAINER = [
    "_active_loop",
    "_checkpoint_connector.dump_checkpoint",
    "_logger_connector._callback_metrics",
    "_logger_connector._progress_bar_metrics",
    "_logger_connector.should_update_logs",
    "fit_loop._combined_loader",
    "fit_loop.epoch_loop._batches_that_stepped",
    "fit_loop.epoch_loop._results",
    "fit_loop.epoch_loop.val_loop._results",
    "predict_loop._combined_loader",
]
# public by their form, but Lightning documents none of them
UNDOCUMENTED = [
    "fit_loop.epoch_loop.batch_progress.is_last_batch",
    "fit_loop.epoch_loop.reset_restart_stage",
    "fit_loop.epoch_loop.restarting",
    "fit_loop.is_resuming",
    "fit_loop.on_iteration_done",
    "fit_loop.restarted_mid_epoch",
]
OTHERS = {
    "_layer_sync",  # of strategies/
    "_save_distributed_checkpoint",  # of a strategy's, if it has one
    *("_", "_allreduce", "_batch_size", "_ring", "_sharded", "_tree"),  # parts of texts
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_where_it_was(name: str) -> None:
    assert hasattr(NAMES[name], name), f"{name} has moved from {NAMES[name]}"


@pytest.mark.parametrize("name", [*OF_A_TRAINER, *UNDOCUMENTED])
def test_a_name_of_a_trainer_is_where_it_was(name: str, make_trainer: Any) -> None:
    trainer: Trainer = make_trainer()
    trainer.fit_loop.trainer.training = True  # for `_active_loop`
    attrgetter(name)(trainer)


def test_all_of_them_are_named_here() -> None:
    """The list has no name that no file uses."""
    files = {path for path in PACKAGE.rglob("*.py") if "template" not in path.parts}
    used = private_names(files - {*(PACKAGE / "strategies").rglob("*.py")}) - OTHERS
    named = {part for name in OF_A_TRAINER for part in name.split(".") if part.startswith("_")}
    assert used == {*NAMES, *named}
