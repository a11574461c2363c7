"""The promises, and the small runs of a Trainer that show them."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_mgpu.testing.probe import (
    Data,
    Fails,
    Logs,
    Probe,
    SeesDtype,
    SeesGradients,
    SeesReplicas,
    TwoOptimizers,
    Written,
    adamw_one_cycle,
    mlp,
)
from lightning_mgpu.testing.promises import Case, Kind, Promise, close, nothing, same_bits

UNEVEN = (47, 11)  # samples, in batches of 11, 11, 11, 11 and 3
SMALL = (25, 12)  # 12, 12, 1
LOOSE = close(1e-5)  # what is logged is float32


def fitted(
    kind: Kind, make: Callable[[], LightningModule] = Probe, data: tuple[int, int] = (48, 12), **kwargs: Any
) -> LightningModule:
    """A module made from the seed, and trained on so many samples, in batches of so many."""
    seed_everything(1, verbose=False)
    module = make()
    kind.trainer(**kwargs).fit(module, datamodule=Data(*data))
    return module


def state(module: nn.Module) -> dict[str, Any]:
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


def trains(make: Callable[[], LightningModule] = Probe, **kwargs: Any) -> Case:
    """A case that shows all parameters after training."""
    return lambda kind, directory: state(fitted(kind, make, **kwargs))


def clipping(kind: Kind, directory: Path) -> Any:
    by_value: dict[str, Any] = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    return [state(fitted(kind, **clip)) for clip in ({"gradient_clip_val": 0.1}, by_value)]


def scaler(kind: Kind, directory: Path) -> Any:
    plugins = _scaling(kind)
    return {"parameters": state(fitted(kind, plugins=plugins)), "scaler": plugins[0].state_dict()}


def _scaling(kind: Kind) -> list[MixedPrecision]:
    """Float64 runs as it is under autocast: only the scaling is left, by powers of two, which changes no digit."""
    device = "cuda" if kind.accelerator in ("gpu", "cuda") else "cpu"
    return [MixedPrecision("16-mixed", device, torch.amp.GradScaler(device, growth_interval=2))]


def sync_batchnorm(kind: Kind, directory: Path) -> Any:
    return state(fitted(kind, lambda: Probe(mlp(nn.BatchNorm1d(8))), sync_batchnorm=kind.devices > 1))


def bf16(kind: Kind, directory: Path) -> Any:
    logger = Written()
    module = fitted(kind, SeesDtype, precision="bf16-mixed", logger=logger)
    return {"parameters": state(module), "in bf16": [row.get("in bf16") for _, row in logger.rows]}


def replicas(kind: Kind, directory: Path) -> Any:
    callback = SeesReplicas()
    fitted(kind, callbacks=[callback], data=UNEVEN)
    return callback.are_equal


def gradients(kind: Kind, directory: Path) -> Any:
    callback = SeesGradients()
    fitted(kind, callbacks=[callback])
    return [gradient.cpu() for gradient in callback.seen]


def logged(*names: str, data: tuple[int, int] = (48, 12)) -> Case:
    """A case that shows what is logged under these names, and in which step."""

    def case(kind: Kind, directory: Path) -> Any:
        logger = Written()
        fitted(kind, Logs, data, logger=logger)
        return {name: [(step, row[name]) for step, row in logger.rows if name in row] for name in names}

    return case


def evaluation(kind: Kind, directory: Path) -> Any:
    seed_everything(1, verbose=False)
    trainer = kind.trainer()
    trainer.test(Logs(), datamodule=Data(batch_size=256, num_test=10_007), verbose=False)
    metrics = trainer.callback_metrics
    return {"error": metrics["error"].cpu(), **{name: int(metrics[name]) for name in ("samples", "indices")}}


def predictions(kind: Kind, directory: Path) -> Any:
    returned = kind.trainer().predict(Probe(), datamodule=Data(num_test=107))
    return torch.cat([part.cpu() for part in returned]).tolist()  # type: ignore[misc, union-attr]


def save(kind: Kind, directory: Path, resume_from: Path | None = None) -> Any:
    """Trains for three epochs, with a GradScaler, and saves a checkpoint in the middle of the second one."""
    seed_everything(2 if resume_from else 1, verbose=False)  # what is not restored shows
    saving = ModelCheckpoint(directory, kind.strategy + "-{step}", save_top_k=-1, every_n_train_steps=6)
    module, plugins = Probe(configure=adamw_one_cycle), _scaling(kind)
    trainer = kind.trainer(max_epochs=3, plugins=plugins, callbacks=[saving], enable_checkpointing=True)
    trainer.fit(module, datamodule=Data(), ckpt_path=resume_from, weights_only=False if resume_from else None)
    path = resume_from or directory / f"{kind.strategy}-step=6.ckpt"
    content = torch.load(path, map_location="cpu", weights_only=False)
    saved = {name: content[name] for name in ("state_dict", "optimizer_states", "lr_schedulers")}
    return {"parameters": state(module), "saved": saved, "scaler": plugins[0].state_dict()}


def resume(kind: Kind, directory: Path) -> Any:
    """Goes on from one device's checkpoint."""
    return save(kind, directory, resume_from=directory / "auto-step=6.ckpt")


def reproducible(kind: Kind, directory: Path) -> Any:
    return [state(fitted(kind, lambda: Probe(mlp(dropout=0.3)))) for _ in range(2)]


def any_devices(kind: Kind, directory: Path) -> Any:
    """Runs with dropout, BatchNorm and a scheduler; nothing where the strategy has no option `replicas`."""
    if not kind.has_option("replicas"):
        return None
    num_devices = torch.cuda.device_count() if kind.accelerator in ("gpu", "cuda") else 4
    kinds = [Kind(kind.strategy, k, kind.accelerator) for k in (1, 2, 4) if k <= num_devices]
    make = lambda: Probe(mlp(nn.BatchNorm1d(8), dropout=0.3), adamw_one_cycle)  # noqa: E731
    return [state(fitted(each, make, strategy=each.make_strategy(replicas=4))) for each in kinds]


def cleanup(kind: Kind, directory: Path) -> Any:
    """What is otherwise after a run: threads, settings of torch, a module that is of no use by itself."""
    threads, settings = threading.enumerate(), _settings()
    module = fitted(kind).cpu()
    torchs = ("pin_memory", "Dummy", "Thread-autograd")
    left = [t.name for t in threading.enumerate() if t not in threads and not t.name.startswith(torchs)]
    changed = [name for name, value in _settings().items() if value != settings.get(name, value)]
    module.zero_grad()
    X = torch.ones(2, 6, dtype=torch.float64)
    module.training_step((X, X[:, :3], None), 0).backward()  # type: ignore[union-attr]
    without = [name for name, parameter in module.named_parameters() if parameter.grad is None]
    return {"threads": ", ".join(left), "changed": ", ".join(changed), "without gradient": ", ".join(without)}


def _settings() -> dict[str, Any]:
    return {
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        **functions(),
    }


def functions() -> dict[str, Any]:
    """Functions, or their code, that a strategy may have replaced for as long as a step takes."""
    owners = (LightningModule, Trainer, nn.Module, Metric, Tensor, Optimizer, torch.autograd.forward_ad.dual_level)
    spaces = (torch, torch.random, torch.autograd, torch.autograd.graph, torch._functorch.eager_transforms, *owners)
    found = {f"{at.__name__}.{name}": it for at in spaces for name, it in list(vars(at).items()) if callable(it)}
    return {name: getattr(it, "__code__", it) for name, it in found.items()}


def must_fail(found: Any, expected: Any) -> str:
    return "ended with no error at all"


TWO_LOSSES = logged("loss_step", "loss_epoch")
TWO_LOSSES_UNEVEN = logged("loss_step", "loss_epoch", data=UNEVEN)
WITH_ADAMW = trains(lambda: Probe(configure=adamw_one_cycle))
WITH_BATCH_NORM = trains(lambda: Probe(mlp(nn.BatchNorm1d(8))))

PROMISES = {
    "parameters": Promise("parameters after training are those of one device", trains()),
    "uneven": Promise("... with batches that do not divide evenly", trains(data=UNEVEN)),
    "small": Promise("... with a batch smaller than the number of devices", trains(data=SMALL)),
    "clipping": Promise("... with gradients clipped, by norm and by value", clipping),
    "accumulation": Promise("... with gradients accumulated over batches", trains(accumulate_grad_batches=3)),
    "schedulers": Promise("... with AdamW and a scheduler stepped every batch", WITH_ADAMW),
    "manual": Promise("... with two optimizers in manual optimization", trains(TwoOptimizers)),
    "scaler": Promise("... with a GradScaler", scaler),
    "sync_batchnorm": Promise("... with BatchNorm and `sync_batchnorm=True`", sync_batchnorm),
    "batchnorm": Promise("... with BatchNorm as it is", WITH_BATCH_NORM),
    "bf16": Promise("bf16 autocast reaches every replica", bf16, close(0.02)),
    "replicas": Promise("replicas are bit-identical after every step", replicas),
    "gradients": Promise("callbacks see the reduced gradient", gradients),
    "logging": Promise("logged values are those of one device, in every step", TWO_LOSSES, LOOSE),
    "logging_uneven": Promise("... with batches that do not divide evenly", TWO_LOSSES_UNEVEN, LOOSE),
    "metrics": Promise("torchmetrics objects have the value of one device", logged("error"), LOOSE),
    "evaluation": Promise("every test sample counts once (10,007)", evaluation, LOOSE),
    "predictions": Promise("`predict` returns all samples in dataset order", predictions),
    "save": Promise("checkpoints have the module's own keys", save),
    "resume": Promise("a run goes on from one device's checkpoint, in mid-epoch", resume, alone=save),
    "reproducible": Promise("the same seed gives the same bits, dropout included", reproducible, same_bits, nothing),
    "any_devices": Promise("the same bits on any number of devices (`replicas=4`)", any_devices, same_bits, nothing),
    "error": Promise(
        "an error in one replica ends the run with it", trains(Fails), must_fail, nothing, "sample 47 cannot be used"
    ),
    "cleanup": Promise("nothing is left behind: threads, processes, settings", cleanup),
}
"""By name, in the order of the table."""

CANNOT = {
    ("ddp", "uneven"): "the means of the processes are averaged with equal weights",
    ("ddp", "small"): "a process cannot go without samples: a clear error",
    ("ddp", "manual"): "parameters outside a loss need `ddp_find_unused_parameters_true`",
    ("ddp", "sync_batchnorm"): "torch's SyncBatchNorm needs GPUs",
    ("ddp", "logging_uneven"): "logged values are averaged so as well",
    ("ddp", "predictions"): "every process returns its share; the `predict` subcommand puts them together",
    ("ddp", "cleanup"): "Lightning's launcher watches its processes from a thread until the script ends",
    ("*", "batchnorm"): "BatchNorm normalises each device's shard by itself",
}
"""By strategy, `*` for all, and promise: why it cannot be kept on several devices. The suite fails if it is kept."""
