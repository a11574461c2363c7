"""Histograms of gradients and parameters for Weights & Biases, as they are just before an optimizer step.

    --wandb.watch=gradients
    --wandb.watch=all --wandb.watch_freq=10

`wandb.watch` hooks the backward pass of one process or replica. Here it is the gradient that the optimizer gets:
reduced over the devices, and unscaled under mixed precision.
"""

from typing import Any, Literal

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override


class Watch(Callback):
    """Logs `gradients/NAME` and `parameters/NAME` to the run's W&B, from the first process.

    Args:
        log: What to watch.
        every: Optimizer steps from one histogram to the next; each waits for the device once a tensor.
    """

    def __init__(self, log: Literal["gradients", "parameters", "all"] = "gradients", every: int = 100) -> None:
        self.what = log  # `log` is taken: Lightning hands every callback the model's
        self.every = every

    @override
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        logger = next((logger for logger in trainer.loggers if isinstance(logger, WandbLogger)), None)
        if logger is None or not trainer.is_global_zero or trainer.global_step % self.every:
            return
        import wandb

        own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        tensors: dict[str, Tensor] = {}
        for name, parameter in pl_module.named_parameters():
            if id(parameter) in own and self.what != "parameters" and parameter.grad is not None:
                tensors[f"gradients/{name}"] = parameter.grad
            if id(parameter) in own and self.what != "gradients":
                tensors[f"parameters/{name}"] = parameter
        finite = {name: values[values.isfinite()].detach().float().cpu() for name, values in tensors.items()}
        histograms: dict[str, Any] = {
            name: wandb.Histogram(values.tolist()) for name, values in finite.items() if len(values)
        }
        logger.log_metrics(histograms, trainer.global_step)
