"""Which user code runs around steps. It may edit weights and gradients unseen.

torch counts edits in place, but not those of `.data`. So after unknown code the other replicas get
copies of the first one's weights. This file lists the code that edits nothing, instead of the code
that may edit: if an entry is missing, steps take longer, but no weight is wrong.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, callbacks
from lightning.pytorch.plugins import precision
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler, optimizer

EDITS_NOTHING = "edits_nothing"  # a class of callbacks says so of its own hooks
READERS = {
    LightningModule,
    Callback,
    callbacks.DeviceStatsMonitor,
    callbacks.EarlyStopping,
    callbacks.LearningRateMonitor,
    callbacks.ModelCheckpoint,
    callbacks.ModelSummary,
    callbacks.ProgressBar,
    callbacks.RichProgressBar,
    callbacks.TQDMProgressBar,
    callbacks.SpikeDetection,
    callbacks.ThroughputMonitor,
    callbacks.Timer,
}
# methods and properties that no Trainer calls around a step, and the steps themselves
OF_STEPS = """
forward training_step validation_step test_step predict_step all_gather log log_dict print freeze
unfreeze optimizers lr_schedulers manual_backward toggle_optimizer untoggle_optimizer
toggled_optimizer save_hyperparameters load_from_checkpoint remove_ignored_hparams to_onnx
to_tensorrt to_torchscript automatic_optimization current_epoch device device_mesh dtype
example_input_array fabric global_rank global_step hparams hparams_initial local_rank logger loggers
on_gpu strict_loading trainer
""".split()  # noqa: SIM905
# the strategy distrusts its replicas after these
BETWEEN = """
setup teardown prepare_data train_dataloader val_dataloader test_dataloader predict_dataloader
configure_callbacks configure_model configure_optimizers configure_sharded_model state_dict
load_state_dict state_key on_exception on_fit_start on_fit_end on_sanity_check_start
on_sanity_check_end on_train_start on_train_end on_train_epoch_start on_train_epoch_end
on_validation_start on_validation_end on_validation_epoch_start on_validation_epoch_end
on_validation_model_eval on_test_start on_test_end on_test_epoch_start on_test_epoch_end
on_test_model_eval on_predict_start on_predict_end on_predict_epoch_start on_predict_epoch_end
on_predict_model_eval on_save_checkpoint on_load_checkpoint
""".split()  # noqa: SIM905
# of those, what may run between an update and the moment when replicas are compared
BEFORE_CHECKS = """
on_train_epoch_start on_train_epoch_end on_train_end on_validation_start on_validation_model_eval
on_test_start on_predict_start on_save_checkpoint state_dict
""".split()  # noqa: SIM905
# what does not run between a step and its backward pass
NOT_BEFORE_BACKWARD = """
on_train_batch_start on_train_batch_end on_after_backward on_before_optimizer_step optimizer_step
configure_gradient_clipping clip_gradients lr_scheduler_step on_before_batch_transfer
transfer_batch_to_device on_after_batch_transfer
""".split()  # noqa: SIM905
OF_MODULES = {name for name in dir(LightningModule) if name not in dir(nn.Module)}
AROUND = {name for name in OF_MODULES | {*vars(Callback)} if not name.startswith("_")}
AROUND -= {*OF_STEPS, *BETWEEN}
TORCH_OPTIMIZERS = {each for each in vars(torch.optim).values() if isinstance(each, type)}
TORCH_SCHEDULERS = {each for each in vars(lr_scheduler).values() if isinstance(each, type)}
PRECISIONS = {each for each in vars(precision).values() if isinstance(each, type)}
STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # private
GLOBAL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")  # private


def unknown_code(module: Any, optimizers: Sequence[Optimizer]) -> set[str]:
    """The names of hooks and classes that run around steps and are not known to edit nothing."""
    trainer = module.trainer
    owners = [module, *trainer.callbacks, getattr(trainer, "datamodule", None)]
    names = {name for owner in owners for name in overridden(type(owner)) & AROUND}  # type: ignore
    names |= {name for owner in owners[:-1] for name in vars(owner).keys() & AROUND}  # instances'
    names |= {name for each in optimizers for name in STEP_HOOKS if getattr(each, name, None)}
    names |= {name for name in GLOBAL_HOOKS if getattr(optimizer, name)}
    schedulers = [config.scheduler for config in trainer.strategy.lr_scheduler_configs]
    names |= {type(each).__name__ for each in schedulers if not _is_torchs(each)}
    plugin = trainer.precision_plugin
    methods = {name for name, each in vars(Precision).items() if callable(each)}
    is_torchs = type(plugin) in PRECISIONS and not vars(plugin).keys() & methods
    return names if is_torchs else names | {type(plugin).__name__}


def _is_torchs(scheduler: Any) -> bool:
    """Whether a scheduler is one of torch's as it is, and so are those that it holds."""
    return (
        type(scheduler) in TORCH_SCHEDULERS
        and "step" not in vars(scheduler)
        and all(map(_is_torchs, getattr(scheduler, "_schedulers", ())))
    )


def may_edit_before_checks(module: Any) -> bool:
    """Whether user hooks run between an update and the comparison of its replicas."""
    names, owners = {*BEFORE_CHECKS}, [module, *module.trainer.callbacks]
    hooks = [overridden(type(owner)) | vars(owner).keys() for owner in owners]  # type: ignore
    return any(names & each for each in hooks)


@cache
def overridden(cls: Any) -> frozenset[str]:
    """The hooks of a class of modules or callbacks whose code is not known to edit nothing."""
    names = [name for name in {*AROUND, *BEFORE_CHECKS} if hasattr(cls, name)]
    return frozenset(name for name in names if not _is_reader(_definer(cls, name)))


def _definer(cls: type, name: str) -> type:
    return next((each for each in cls.__mro__ if name in vars(each)), cls)


def _is_reader(cls: type) -> bool:
    return cls in READERS or issubclass(LightningModule, cls) or vars(cls).get(EDITS_NOTHING, False)


def has_hooks(param: Tensor) -> bool:
    """Whether `register_hook` or `register_post_accumulate_grad_hook` was called on a parameter."""
    return bool(param._backward_hooks or param._post_accumulate_grad_hooks)  # private
