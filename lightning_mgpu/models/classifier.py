"""The base class of classifiers: cross-entropy, accuracy, optimizer and scheduler.

A model is a subclass that creates `self.net`; it never mentions devices, ranks or strategies.

    --model=LeNet --model.lr=0.1 --model.lr_scheduler=OneCycle
    --model.optimizer=AdamW --model.optimizer.lr=0.001
"""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from functools import cache, partial
from inspect import isclass, signature
from math import inf
from typing import Any, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import LRSchedulerTypeUnion, OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

Init = Literal["book", "kaiming"]  # initial weights: N(0, 0.01), or He et al. (2015)
TARGETS = ("labels", "label", "target")  # keys of the target in a dict, as in Hugging Face
# matches no label: -100, torch's default, would skip samples but not their weight
NO_LABEL = -(2**62)


class OneCycle(OneCycleLR):
    """torch's `OneCycleLR`; `max_lr` defaults to the learning rate of the optimizer."""

    def __init__(self, optimizer: Optimizer, max_lr: float | None = None, **kwargs: Any) -> None:
        super().__init__(optimizer, max_lr or [g["lr"] for g in optimizer.param_groups], **kwargs)


class MeanLoss(Metric):
    """Weighted mean of a loss. Unlike `torchmetrics.MeanMetric`, it never waits for a GPU."""

    total: Tensor
    weight: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("weight", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, loss: Tensor, weight: Tensor | float) -> None:
        # `bf16-true` converts the states to bfloat16, which is too imprecise for sums
        dtype = torch.promote_types(loss.dtype, torch.float32)
        weight = torch.zeros_like(loss, dtype=dtype) + weight
        # a loss with weight 0 may be NaN: ignore it
        total = torch.where(weight == 0, 0.0, loss.to(dtype) * weight)
        # not in place: the processes of `ddp_spawn` share the memory of a CPU tensor
        self.total, self.weight = self.total.to(dtype) + total, self.weight.to(dtype) + weight

    def compute(self) -> Tensor:
        return self.total / self.weight


class Classifier(LightningModule):
    """Trains `self.net`, for example on images (N, C, H, W) with logits (N, num_classes).

    A batch is (X, y), or a dict: see `inputs_and_target`. The loss is cross-entropy.
    Logs `{train,val,test}_loss` (nats) and `{train,val,test}_acc` (fraction) per epoch, as means
    over samples, and every `trainer.log_every_n_steps` steps the minibatch `loss`: the mean over
    the processes' last shards.

    Args:
        lr: Learning rate of SGD. Default: `default_lr` of the model.
        optimizer: Creates a torch optimizer from the parameters, instead of SGD.
        lr_scheduler: Creates a torch scheduler from the optimizer. `total_steps` defaults to the
            length of the run, `monitor` (of `ReduceLROnPlateau`) to `val_loss`.
        lr_interval: Default: `step` for `CyclicLR` and with `total_steps`, else `epoch`.
        num_classes: Width of the logits.
        label_smoothing: Label smoothing in training (Szegedy et al., 2016).
        flip_tta: In evaluation, average the logits of an image and its mirror image.
        channels_last: Use the channels-last memory format, which speeds up convolutions.
        compile: Train with `torch.compile`, which recompiles for every new batch size.
    """

    net: nn.Module
    default_lr = 0.1

    def __init__(
        self,
        lr: float | None = None,
        optimizer: Callable[[Iterable], Optimizer] | None = None,
        lr_scheduler: Callable[..., LRSchedulerTypeUnion] | None = None,
        lr_interval: Literal["epoch", "step"] | None = None,
        num_classes: int = 10,
        label_smoothing: float = 0.0,
        flip_tta: bool = False,
        channels_last: bool = False,
        compile: bool = False,
    ) -> None:
        super().__init__()
        if lr is not None and optimizer is not None:
            raise ValueError(f"model.lr={lr} is for SGD: use model.optimizer.lr and model.lr=null.")
        # checkpoints must not pickle functions
        self.save_hyperparameters(logger=False)
        for name in [name for name, value in self.hparams.items() if callable(value)]:
            del self.hparams[name]
        self.optimizer = optimizer or partial(SGD, lr=self.default_lr if lr is None else lr)
        self.lr_scheduler, self.lr_interval = lr_scheduler, lr_interval
        self.num_classes, self.label_smoothing = num_classes, label_smoothing
        self.flip_tta, self.channels_last, self.compiles = flip_tta, channels_last, compile
        accuracy = partial(MulticlassAccuracy, num_classes, average="micro", validate_args=False)
        self.train_loss, self.train_acc = MeanLoss(), accuracy()
        self.val_loss, self.val_acc = MeanLoss(), accuracy()
        self.test_loss, self.test_acc = MeanLoss(), accuracy()

    def setup(self, stage: str) -> None:
        if self.channels_last:
            self.net.to(memory_format=torch.channels_last)
        self._copy_metrics()

    def make_metrics(self) -> MetricCollection:
        """Override to add metrics of logits (N, num_classes) and labels (N,).

        Each stage has its own copies: `f1` is logged as `train_f1`, `val_f1` and `test_f1`.
        """
        return MetricCollection({})

    def _copy_metrics(self) -> None:
        if hasattr(self, "train_own_metrics"):  # the test after `fit`
            return
        made: Any = self.make_metrics()
        if not isinstance(made, (dict, MetricCollection)):
            raise ValueError("make_metrics must return a MetricCollection or a dict")
        if taken := {"acc", "loss"}.intersection(made):
            raise ValueError(f"make_metrics: {taken.pop()} is reserved: use a different name")
        for stage in ("train", "val", "test"):
            # Lightning computes metrics one by one, which breaks compute groups
            copies = MetricCollection(deepcopy({**made}), prefix=f"{stage}_", compute_groups=False)
            setattr(self, f"{stage}_own_metrics", copies.to(self.device))

    def inputs_and_target(self, batch: Any) -> tuple[Any, Tensor | None]:
        """Split a batch into the inputs of `forward` and labels (N,), or `None` without labels.

        Supports (X, y), X, (X,), and dicts: the target is `labels`, `label` or `target`, and all
        other entries are keyword arguments of `self.net`. Override this method for different
        batches: all steps, and the pictures of a test, use it.

        Raises:
            ValueError: If the batch is none of these.
        """
        if isinstance(batch, Mapping):  # a `BatchEncoding` is not a dict
            inputs = dict(batch)
            name = next((key for key in TARGETS if key in inputs), "")
            return inputs, inputs.pop(name, None)
        parts = batch if isinstance(batch, (tuple, list)) else [batch]
        if len(parts) in (1, 2) and isinstance(parts[-1], Tensor):
            return parts[0], parts[1] if len(parts) == 2 else None
        raise self._batch_error(batch, "supports X, (X, y) or a dict")

    def forward(self, X: Any) -> Tensor:
        if isinstance(X, Mapping):
            if self.channels_last or self.flip_tta:
                raise ValueError("model.channels_last, model.flip_tta: need images, not a dict")
            try:
                signature(self.net.forward).bind(**X)
            except TypeError as error:
                why = f"does not match the signature of self.net: {error}"
                raise self._batch_error(X, why) from error
        if self.channels_last:
            X = X.contiguous(memory_format=torch.channels_last)
        compute = compiled_logits() if self.training and self.compiles else logits_of
        if self.training or not self.flip_tta:
            return compute(self.net, X)
        if X.ndim != 4:
            raise ValueError(f"model.flip_tta: needs images (N, C, H, W), not {tuple(X.shape)}")
        return (compute(self.net, X) + compute(self.net, X.flip(-1))) / 2

    def compute_loss(self, logits: Tensor, y: Tensor) -> Tensor | tuple[Tensor, Tensor | float]:
        """The loss: a mean over samples, or, of anything else, the mean and its weight."""
        smoothing = self.label_smoothing if self.training else 0.0
        return F.cross_entropy(logits, y, ignore_index=NO_LABEL, label_smoothing=smoothing)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, _, y, weight = self._step(batch, "train")
        every = self.trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and (self.trainer.global_step + 1) % every == 0:
            # no `prog_bar`: every step would wait for the device
            self.log("loss", loss, batch_size=len(y), sync_dist=True)
        return loss if weight is None else {"loss": loss, "weight": weight}

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._step(batch, "val")[0]

    def test_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        return dict(zip(("loss", "logits"), self._step(batch, "test")))

    def predict_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Class probabilities (N, num_classes), and the labels if the batch has them."""
        X, y = self._read(batch)
        probabilities = self(X).softmax(dim=1)
        found = {"prediction": probabilities.argmax(dim=1), "probabilities": probabilities}
        return found if y is None else {"label": y, **found}

    def _step(self, batch: Any, stage: str) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Loss, logits and labels of a batch, and the weight of the loss; updates metrics."""
        X, y = self._read(batch)  # for example (N, C, H, W), (N,)
        if y is None:
            raise self._batch_error(batch, "found no target")
        self._copy_metrics()  # if `setup` of a subclass does not call ours
        logits = self(X)  # (N, num_classes)
        if not isinstance(logits, Tensor):
            reason = "override `forward` to return a tensor"
            raise ValueError(
                f"self.net returns a {type(logits).__name__} without `logits`: {reason}"
            )
        if logits.ndim < 2 or logits.shape[1] < 2:
            reason = "must have two or more columns: use two logits, or a LightningModule"
            raise ValueError(f"logits of shape {tuple(logits.shape)}: {reason}")
        given = self.compute_loss(logits, y)
        loss, weight = given if isinstance(given, tuple) else (given, None)
        getattr(self, f"{stage}_loss").update(loss.detach(), len(y) if weight is None else weight)
        for name in ("acc", "own_metrics"):
            getattr(self, f"{stage}_{name}").update(logits.detach(), y)
        return loss, logits, y, weight

    def _read(self, batch: Any) -> tuple[Any, Tensor | None]:
        match self.inputs_and_target(batch):
            case [X, (Tensor() | None) as y]:
                return X, y
        raise self._batch_error(batch, "must return inputs and a tensor of labels, or None")

    def _batch_error(self, batch: Any, why: str) -> ValueError:
        what = type(batch).__name__
        if isinstance(batch, Mapping):
            what += f" of {', '.join(map(str, batch))}"
        elif isinstance(batch, (tuple, list)):
            what += f" of {len(batch)}"
        hook = f"{type(self).__name__}.inputs_and_target"
        return ValueError(f"{hook} {why}; the batch is a {what}: override this method")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self._log("train")

    def on_validation_epoch_end(self) -> None:
        self._log("val")

    def on_test_epoch_end(self) -> None:
        self._log("test")

    def _log(self, stage: str) -> None:
        """Log the updated metrics; Lightning computes them when the epoch ends."""
        metrics = {name: getattr(self, name) for name in (f"{stage}_loss", f"{stage}_acc")}
        metrics |= getattr(self, f"{stage}_own_metrics", {}).items()
        updated = {name: metric for name, metric in metrics.items() if metric.update_called}
        self.log_dict(updated, on_step=False, on_epoch=True)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        has_length, length = self._run_length()  # may call the user's `train_dataloader`
        try:
            optimizer = self.optimizer(self.parameters())
            scheduler = self.lr_scheduler(optimizer, **length) if self.lr_scheduler else None
        except (TypeError, ValueError) as error:
            raise ValueError(f"model.lr, optimizer or lr_scheduler: {error}") from error
        if scheduler is None:
            return optimizer
        interval = "step" if has_length or isinstance(scheduler, CyclicLR) else "epoch"
        monitor = getattr(scheduler, "monitor", "val_loss")  # of ReduceLROnPlateau
        config: Any = {"scheduler": scheduler, "monitor": monitor}
        config["interval"] = self.lr_interval or interval
        return {"optimizer": optimizer, "lr_scheduler": config}

    def _run_length(self) -> tuple[bool, dict[str, int]]:
        """Whether the scheduler has `total_steps`, and its value if not set by the user."""
        make: Any = self.lr_scheduler
        given = getattr(make, "keywords", {})  # of a `partial`; the command line's has all
        classes = [arg for arg in getattr(make, "args", ()) if isclass(arg)]  # and a class
        make = classes[0] if classes else getattr(make, "func", make)
        parameter = signature(make).parameters.get("total_steps") if make else None
        has_length = bool(parameter or "total_steps" in given or make is OneCycle)
        default = parameter and parameter.default
        if not has_length or given.get("epochs") or given.get("total_steps", default) != default:
            return has_length, {}
        by_epoch = self.lr_interval == "epoch"
        num_steps = self.trainer.max_epochs if by_epoch else self.trainer.estimated_stepping_batches
        if num_steps in (None, -1, inf):
            raise ValueError("lr_scheduler.total_steps: unknown length: set trainer.max_epochs")
        return True, {"total_steps": int(num_steps)}


def logits_of(net: nn.Module, X: Any) -> Tensor:
    """The logits, which Hugging Face models return as an attribute."""
    found = net(**X) if isinstance(X, Mapping) else net(X)
    return getattr(found, "logits", found)


@cache
def compiled_logits() -> Callable[[nn.Module, Any], Tensor]:
    return torch.compile(logits_of)  # `net.compile()` skips torch's own before 2.14


def init_weights(net: nn.Module, init: Init, zero_biases: bool) -> None:
    """Initialize by N(0, 0.01), as in the book, or N(0, 2 / fan_in), as in He et al. (2015)."""
    for layer in net.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            if init == "book":
                nn.init.normal_(layer.weight, std=0.01)
            else:
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            if layer.bias is not None and (zero_biases or init == "kaiming"):
                nn.init.zeros_(layer.bias)
