"""Histograms of gradients and parameters for Weights & Biases, as they are just before an optimizer step.

    --wandb.watch=gradients
    --wandb.watch=all --wandb.watch_freq=10

`wandb.watch` hooks the backward pass of one module, where under `ddp` a process sees its own gradient alone. Here it is
the gradient the optimizer gets: reduced over the devices, and unscaled under mixed precision.
"""

from typing import Literal

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

NUM_BINS = 64  # as wandb.watch


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
        metrics = {}
        for name, parameter in pl_module.named_parameters():
            if id(parameter) not in own:
                continue
            if self.what != "parameters" and parameter.grad is not None:
                metrics[f"gradients/{name}"] = histogram(parameter.grad)
            if self.what != "gradients":
                metrics[f"parameters/{name}"] = histogram(parameter)
        histograms = {name: wandb.Histogram(np_histogram=counts) for name, counts in metrics.items()}
        logger.log_metrics(histograms, trainer.global_step)  # type: ignore[arg-type]


def histogram(tensor: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Counts and edges of 64 bins from the least to the greatest finite value; counted on the tensor's device."""
    values = tensor.detach().float().flatten()
    values = values[values.isfinite()]
    low, high = values.aminmax() if len(values) else (values.new_zeros(()),) * 2
    if low == high:  # one value: a bin around it
        low, high = low - 0.5, high + 0.5
    counts = torch.histc(values, NUM_BINS, low.item(), high.item())
    return counts.cpu().numpy(), np.linspace(low.item(), high.item(), NUM_BINS + 1)
