"""Private names of torch, Lightning, torchmetrics that the engine needs. A release may move one."""

from operator import attrgetter
from pathlib import Path

import pytest
import torch
import torchmetrics
from lightning.fabric.utilities import data
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies.launchers import subprocess_script
from tiny_runs import Regression
from torch import nn
from torch.optim import optimizer

from lightning_mgpu import strategies
from tests.private_names import private_names

FOLDER = Path(strategies.__file__).parent
WEIGHT, LINEAR = nn.Parameter(torch.ones(1)), nn.Linear(1, 1)
SGD = torch.optim.SGD([WEIGHT], 0.1)
F1 = torchmetrics.classification.BinaryF1Score()

NAMES = {  # who has it, outside of a run
    "_parameters": LINEAR,
    "_buffers": LINEAR,
    "_modules": LINEAR,
    "_compiled_call_impl": LINEAR,
    "_flat_weights": nn.LSTM(1, 1),
    "_flat_weight_refs": nn.LSTM(1, 1),
    "_NormBase": nn.modules.batchnorm,
    "_BatchNorm": nn.modules.batchnorm,
    "_version": WEIGHT,
    "_backward_hooks": WEIGHT,
    "_post_accumulate_grad_hooks": WEIGHT,
    "_foreach_copy_": torch,
    "_dynamo": torch,
    "_C": torch,
    "_autograd": torch._C,
    "_are_functorch_transforms_active": torch._C,
    "_get_current_graph_task_keep_graph": torch._C._autograd,
    "_global_optimizer_pre_hooks": optimizer,
    "_global_optimizer_post_hooks": optimizer,
    "_schedulers": torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ConstantLR(SGD)]
    ),
    "_optimizer_step_pre_hooks": SGD,
    "_optimizer_step_post_hooks": SGD,
    "_device": LightningModule(),
    "_metric_attributes": LightningModule(),
    "_param_requires_grad_state": LightningModule(),
    "_SubprocessScriptLauncher": subprocess_script,
    "_auto_add_worker_init_fn": data,
    "_LightningModule__to_tensor": LightningModule,
    "_forward_cache": F1,
    "_enable_compute_groups": torchmetrics.MetricCollection(F1),
}
IN_A_RUN = ["_results", "strategy._layer_sync", "strategy._lightning_optimizers"]  # of a Trainer
WORDS = {"_fields", "_hooks", "_"}  # of named tuples; an ending, a beginning


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_where_it_was(name):
    assert hasattr(NAMES[name], name), f"{name} has moved from {NAMES[name]}"


@pytest.mark.parametrize("engine", ["dp"], indirect=True)
def test_names_of_a_trainer(train):
    class Looks(Regression):
        def training_step(self, batch, batch_idx):
            results, *_ = attrgetter(*IN_A_RUN)(self.trainer)
            assert results is not None
            return self.loss(batch)

    train(Looks, 2, max_steps=1)


def test_all_of_them_are_named_here():
    """And each one named here is used."""
    private = private_names(FOLDER.glob("*.py")) - WORDS
    assert private == {*NAMES, *(name.split(".")[-1] for name in IN_A_RUN)}
