"""What every image classifier here shares: cross-entropy, accuracy, optimizer and scheduler.

A model is a subclass that builds `self.net`; it never mentions devices, ranks or strategies.

    --model=LeNet --model.optimizer=AdamW --model.optimizer.lr=0.001
    --model.lr_scheduler=OneCycleLR  # every batch; highest rate and length are filled in
    --model.lr_scheduler=StepLR --model.lr_scheduler.step_size=3     # every epoch
    --model.lr_scheduler=CosineAnnealingLR --model.lr_scheduler.T_max=2150 --model.lr_interval=step
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import LRSchedulerTypeUnion, OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CyclicLR, ReduceLROnPlateau
from torch.optim.lr_scheduler import OneCycleLR as TorchOneCycleLR
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy


class OneCycleLR(TorchOneCycleLR):
    """Torch's, whose `max_lr` is the optimizer's learning rate if it is left out."""

    def __init__(
        self, optimizer: Optimizer, max_lr: float | list[float] | None = None, **kwargs: Any
    ) -> None:
        if max_lr is None:
            max_lr = [group["lr"] for group in optimizer.param_groups]
        super().__init__(optimizer, max_lr, **kwargs)


OptimizerCallable = Callable[[Iterable], Optimizer]
LRSchedulerCallable = Callable[..., LRSchedulerTypeUnion]


class MeanLoss(Metric):
    """Mean of a loss over samples, from its means over batches.

    `torchmetrics.MeanMetric` looks for NaNs, which makes every step wait for a GPU. With
    `nan_strategy="disable"` it ignores the weights (torchmetrics 1.9).
    """

    total: Tensor
    num_samples: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("num_samples", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, loss: Tensor, num_samples: int) -> None:
        # `bf16-true` turns the states into bfloat16, which has too few digits for a sum
        dtype = torch.promote_types(loss.dtype, torch.float32)
        self.total = self.total.to(dtype) + loss.to(dtype) * num_samples
        # not in place: the processes of `ddp_spawn` share the memory of a CPU tensor
        self.num_samples = self.num_samples + num_samples

    def compute(self) -> Tensor:
        return self.total / self.num_samples


class Classifier(LightningModule):
    """Trains `self.net`, from images (N, C, H, W) to logits (N, num_classes), with cross-entropy.

    Logs `{train,val,test}_loss` (nats, mean over samples) and `{train,val,test}_acc` (fraction)
    once per epoch, and the minibatch `loss` every `trainer.log_every_n_steps`. The sums behind them
    stay on the device until the epoch ends, so a step never waits for the device.

    Args:
        optimizer: Makes a torch optimizer of the parameters.
        lr_scheduler: Makes a torch scheduler of the optimizer. A `OneCycleLR` without
            `total_steps` gets the length of the run; without `max_lr`, this package's rises to the
            optimizer's learning rate. `ReduceLROnPlateau` watches its `monitor`, or `val_loss`.
        lr_interval: Whether the scheduler steps after every `epoch` or every `step` (batch). The
            default is `step` for `OneCycleLR` and `CyclicLR`, and `epoch` for all others.
        num_classes: Width of the logits.
        label_smoothing: Share of every training label that is spread over all classes (Szegedy et
            al., 2016). It counts in `train_loss`, but not in `val_loss` and `test_loss`.
        flip_tta: In evaluation mode, answer with the mean of the logits of an image and of its
            mirror image (test-time augmentation; evaluation takes twice as long).
    """

    net: nn.Module

    def __init__(
        self,
        optimizer: OptimizerCallable = lambda params: SGD(params, lr=0.1),
        lr_scheduler: LRSchedulerCallable | None = None,
        lr_interval: Literal["epoch", "step"] | None = None,
        num_classes: int = 10,
        label_smoothing: float = 0.0,
        flip_tta: bool = False,
    ) -> None:
        super().__init__()
        if not 0 <= label_smoothing <= 1:
            raise ValueError(
                f"model.label_smoothing={label_smoothing}: choose a share from 0 (none) to 1."
            )
        # The command line gives plain types, from which a checkpoint can rebuild the model. Python
        # code may give functions, which a checkpoint must not pickle.
        self.save_hyperparameters(logger=False)
        for name in [name for name, value in self.hparams.items() if callable(value)]:
            del self.hparams[name]
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.lr_interval = lr_interval
        self.label_smoothing = label_smoothing
        self.flip_tta = flip_tta
        accuracy = partial(MulticlassAccuracy, num_classes, average="micro", validate_args=False)
        self.train_loss, self.train_acc = MeanLoss(), accuracy()
        self.val_loss, self.val_acc = MeanLoss(), accuracy()
        self.test_loss, self.test_acc = MeanLoss(), accuracy()

    def forward(self, X: Tensor) -> Tensor:
        if self.training or not self.flip_tta:
            return self.net(X)
        # Two calls, not one of 2N: torch.compile would recompile for the new shape.
        return (self.net(X) + self.net(X.flip(-1))) / 2

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss, _ = self._step(batch, self.train_loss, self.train_acc, self.label_smoothing)
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and (self.trainer.global_step + 1) % every == 0:
            # not with `prog_bar`: every step would wait for the device to show it
            self.log("loss", loss, batch_size=len(batch[1]))
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss, _ = self._step(batch, self.val_loss, self.val_acc)
        return loss

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> dict[str, Tensor]:
        loss, logits = self._step(batch, self.test_loss, self.test_acc)
        return {"loss": loss, "logits": logits}

    def predict_step(self, batch: Tensor | Sequence[Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Class probabilities (N, num_classes) for a batch X, (X,) or (X, y)."""
        X, *labels = [batch] if isinstance(batch, Tensor) else batch
        if len(labels) > 1:
            raise ValueError(f"a batch to predict is X, (X,) or (X, y), not {len(batch)} tensors")
        probabilities = self(X).softmax(dim=1)
        return {
            **dict(zip(["label"], labels)),
            "prediction": probabilities.argmax(dim=1),
            "probabilities": probabilities,
        }

    # Lightning keeps a reference to a logged Metric and computes it when the epoch ends: logged at
    # the start, it costs a step nothing, and callbacks see the value in their epoch-end hooks.
    def on_train_epoch_start(self) -> None:
        self.log_dict({"train_loss": self.train_loss, "train_acc": self.train_acc})

    def on_train_start(self) -> None:
        if self.trainer.fit_loop.restarted_mid_epoch:
            # Lightning does not call on_train_epoch_start for the rest of an epoch
            Classifier.on_train_epoch_start(self)

    def on_validation_epoch_end(self) -> None:
        self.log_dict({"val_loss": self.val_loss, "val_acc": self.val_acc})

    def on_test_epoch_end(self) -> None:
        self.log_dict({"test_loss": self.test_loss, "test_acc": self.test_acc})

    def configure_optimizers(self) -> OptimizerLRScheduler:
        length = self._run_length()  # outside `try`: this may call the user's `train_dataloader`
        try:
            optimizer = self.optimizer(self.parameters())
            scheduler = self.lr_scheduler(optimizer, **length) if self.lr_scheduler else None
        except (TypeError, ValueError) as error:
            raise ValueError(f"model.optimizer or model.lr_scheduler: {error}") from error
        if scheduler is None:
            return optimizer
        every_step = isinstance(scheduler, (TorchOneCycleLR, CyclicLR))
        config: dict[str, Any] = {
            "scheduler": scheduler,
            "interval": self.lr_interval or ("step" if every_step else "epoch"),
        }
        if isinstance(scheduler, ReduceLROnPlateau):
            config["monitor"] = getattr(scheduler, "monitor", "val_loss")
        return {"optimizer": optimizer, "lr_scheduler": config}  # type: ignore[return-value]

    def _step(
        self,
        batch: tuple[Tensor, Tensor],
        mean_loss: MeanLoss,
        accuracy: MulticlassAccuracy,
        label_smoothing: float = 0.0,
    ) -> tuple[Tensor, Tensor]:
        """Loss and logits of a batch, which the two metrics count."""
        X, y = batch  # (N, C, H, W), (N,)
        logits = self(X)  # (N, num_classes)
        loss = F.cross_entropy(logits, y, label_smoothing=label_smoothing)
        mean_loss.update(loss.detach(), len(y))
        accuracy.update(logits.detach(), y)
        return loss, logits

    def _run_length(self) -> dict[str, int]:
        """The missing `total_steps`: OneCycleLR needs to know how often it is stepped in the run.

        Raises:
            ValueError: If the run has no end.
        """
        scheduler_class = getattr(self.lr_scheduler, "func", self.lr_scheduler)  # of a `partial`
        arguments = getattr(self.lr_scheduler, "keywords", {})
        has_length = arguments.get("total_steps") or arguments.get("epochs")
        if scheduler_class not in (OneCycleLR, TorchOneCycleLR) or has_length:
            return {}
        by_epoch = self.lr_interval == "epoch"
        num_steps = self.trainer.max_epochs if by_epoch else self.trainer.estimated_stepping_batches
        if num_steps in (None, -1, inf):
            raise ValueError(
                "OneCycleLR needs to know when the run ends: set trainer.max_epochs, "
                f"{'' if by_epoch else 'trainer.max_steps '}or model.lr_scheduler.total_steps"
            )
        return {"total_steps": int(num_steps)}


def kaiming(module: nn.Module) -> None:
    """He et al. (2015): N(0, 2 / fan_in) before a ReLU, so activations keep their size; no bias."""
    if isinstance(module, (nn.Conv2d, nn.Linear)):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)
