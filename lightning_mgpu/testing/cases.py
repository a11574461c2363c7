"""Small runs of a Trainer under any strategy, and what is seen in them: a nesting of dicts and lists of tensors.

Every case is a function of a `Kind` and of a directory all strategies share, and runs in every process of the strategy.
"""

import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

import lightning_mgpu.strategies  # noqa: F401 (registers them)
from lightning_mgpu.testing.probe import (
    Data,
    Fails,
    Logs,
    Probe,
    SavesAtStep,
    SeesDtype,
    SeesGradients,
    SeesReplicas,
    TwoOptimizers,
    Written,
    adamw_one_cycle,
)

CHECKPOINT_STEP = 6  # of four a epoch: in the middle of the second


@dataclass(frozen=True)
class Kind:
    """What to run a case under.

    Args:
        strategy: A name Lightning knows, or the dotted path of a Strategy class, or of a function that returns one.
    """

    strategy: str = "auto"
    devices: int = 1
    accelerator: str = "cpu"

    @property
    def name(self) -> str:
        return f"{self.strategy}-{self.devices}-{self.accelerator}"

    def make_strategy(self) -> Any:
        """A new one for every Trainer; names are left to Lightning.

        Raises:
            ValueError: If there is no such strategy.
        """
        if self.strategy == "auto" or self.strategy in StrategyRegistry:
            return self.strategy
        module, _, attribute = self.strategy.rpartition(".")
        try:
            return getattr(importlib.import_module(module), attribute)()
        except (ImportError, AttributeError, ValueError) as error:
            known = ", ".join(["auto", *sorted(StrategyRegistry.available_strategies())])
            raise ValueError(
                f"strategy {self.strategy!r}: {error}; give a dotted path to a Strategy, or one of {known}."
            ) from error


def trainer_for(kind: Kind, **kwargs: Any) -> Trainer:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    settings = {"max_epochs": 2, "limit_val_batches": 0, "num_sanity_val_steps": 0, "log_every_n_steps": 1}
    return Trainer(
        **{**quiet, **settings, **kwargs},
        strategy=kind.make_strategy(),
        devices=kind.devices,
        accelerator=kind.accelerator,
    )  # type: ignore[arg-type]


def fitted(
    kind: Kind, make: Callable[[], LightningModule] = Probe, data: Data | None = None, **kwargs: Any
) -> LightningModule:
    """A module made from the seed, and trained."""
    seed_everything(1, verbose=False)
    module = make()
    trainer_for(kind, **kwargs).fit(module, datamodule=data or Data())
    return module


def state(module: nn.Module) -> dict[str, Any]:
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


def parameters(kind: Kind, directory: Path) -> Any:
    return state(fitted(kind))


def uneven(kind: Kind, directory: Path) -> Any:
    return state(fitted(kind, data=Data(num_samples=47, batch_size=11)))  # 11, 11, 11, 11, 3


def small(kind: Kind, directory: Path) -> Any:
    return state(fitted(kind, data=Data(num_samples=25, batch_size=12)))  # 12, 12, 1


def clipping(kind: Kind, directory: Path) -> Any:
    settings: list[dict[str, Any]] = [
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ]
    return [state(fitted(kind, **clip)) for clip in settings]


def accumulation(kind: Kind, directory: Path) -> Any:
    return state(fitted(kind, accumulate_grad_batches=3))  # of four batches: windows of 3 and 1


def schedulers(kind: Kind, directory: Path) -> Any:
    return state(fitted(kind, lambda: Probe(configure=adamw_one_cycle)))


def manual(kind: Kind, directory: Path) -> Any:
    return state(fitted(kind, TwoOptimizers))


def scaler(kind: Kind, directory: Path) -> Any:
    plugins = _scaling(kind)
    return {"parameters": state(fitted(kind, plugins=plugins)), "scaler": plugins[0].state_dict()}


def _scaling(kind: Kind) -> list[MixedPrecision]:
    """Float64 runs as it is under autocast: only the scaling is left, by powers of two, which changes no digit."""
    device = "cuda" if kind.accelerator in ("gpu", "cuda") else "cpu"
    return [MixedPrecision("16-mixed", device, torch.amp.GradScaler(device, growth_interval=2))]


def bf16(kind: Kind, directory: Path) -> Any:
    seed_everything(1, verbose=False)
    module = SeesDtype()
    trainer = trainer_for(kind, precision="bf16-mixed")
    trainer.fit(module, datamodule=Data())
    return {"parameters": state(module.net), "samples": trainer.callback_metrics["samples in bf16"]}


def _with_batch_norm() -> LightningModule:
    return Probe(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)))


def batchnorm(kind: Kind, directory: Path) -> Any:
    return state(fitted(kind, _with_batch_norm))


def sync_batchnorm(kind: Kind, directory: Path) -> Any:
    return state(fitted(kind, _with_batch_norm, sync_batchnorm=kind.devices > 1))


def gradients(kind: Kind, directory: Path) -> Any:
    callback = SeesGradients()
    fitted(kind, callbacks=[callback])
    return [gradient.cpu() for gradient in callback.seen]


def _logged(kind: Kind, data: Data) -> dict[str, list[Any]]:
    logger = Written()
    fitted(kind, Logs, data, logger=logger)
    names = ("loss_step", "loss_epoch", "error")
    return {name: [(step, row[name]) for step, row in logger.rows if name in row] for name in names}


def logging(kind: Kind, directory: Path) -> Any:
    logged = _logged(kind, Data())
    return {name: logged[name] for name in ("loss_step", "loss_epoch")}


def logging_uneven(kind: Kind, directory: Path) -> Any:
    logged = _logged(kind, Data(num_samples=47, batch_size=11))
    return {name: logged[name] for name in ("loss_step", "loss_epoch")}


def metrics(kind: Kind, directory: Path) -> Any:
    return _logged(kind, Data())["error"]


def evaluation(kind: Kind, directory: Path) -> Any:
    seed_everything(1, verbose=False)
    trainer = trainer_for(kind)
    trainer.test(Logs(), datamodule=Data(batch_size=256, num_test=10_007), verbose=False)
    return {name: value.cpu() for name, value in trainer.callback_metrics.items()}


def predictions(kind: Kind, directory: Path) -> Any:
    seed_everything(1, verbose=False)
    returned = trainer_for(kind).predict(Probe(), datamodule=Data(num_test=107))
    return torch.cat([part.cpu() for part in returned])  # type: ignore[misc, union-attr]


def replicas(kind: Kind, directory: Path) -> Any:
    callback = SeesReplicas()
    fitted(kind, callbacks=[callback], data=Data(num_samples=47, batch_size=11))
    return callback.are_equal


def reproducible(kind: Kind, directory: Path) -> Any:
    def make() -> LightningModule:
        return Probe(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3)))

    first, second = (state(fitted(kind, make)) for _ in range(2))
    return all(torch.equal(first[name], second[name]) for name in first)


def save(kind: Kind, directory: Path, with_scaler: bool = False) -> Any:
    """Trains to the end, and leaves a checkpoint from the middle of the second epoch behind."""
    path = _checkpoint(kind, directory, with_scaler)
    module, scaler = _trained(kind, with_scaler, callbacks=[SavesAtStep(path, CHECKPOINT_STEP)])
    keys = list(torch.load(path, weights_only=False)["state_dict"])
    return {"parameters": state(module), "keys": keys, "scaler": scaler}


def resume(kind: Kind, directory: Path, before: Kind | None = None, with_scaler: bool = False) -> Any:
    """Goes on from the checkpoint of another kind, a single device's if none is given."""
    path = _checkpoint(before or Kind(accelerator=kind.accelerator), directory, with_scaler)
    module, scaler = _trained(kind, with_scaler, path)
    return {"parameters": state(module), "keys": list(state(module)), "scaler": scaler}


def _checkpoint(kind: Kind, directory: Path, with_scaler: bool) -> Path:
    return directory / f"{kind.name}{'-scaler' * with_scaler}-{CHECKPOINT_STEP}.ckpt"


def _trained(
    kind: Kind, with_scaler: bool, ckpt_path: Path | None = None, **kwargs: Any
) -> tuple[LightningModule, Any]:
    seed_everything(1 if ckpt_path is None else 2, verbose=False)  # what is not restored shows
    module = Probe(configure=adamw_one_cycle)
    plugins = _scaling(kind) if with_scaler else []
    trainer = trainer_for(kind, max_epochs=3, plugins=plugins, **kwargs)
    trainer.fit(module, datamodule=Data(), ckpt_path=ckpt_path, weights_only=False if ckpt_path else None)
    return module, [plugin.state_dict() for plugin in plugins]


def error(kind: Kind, directory: Path) -> Any:
    fitted(kind, Fails)


def cleanup(kind: Kind, directory: Path) -> Any:
    """What is otherwise after a run: threads, settings of torch, a module that is of no use by itself."""
    before = _settings()
    module = fitted(kind)
    left = [thread.name for thread in threading.enumerate() if thread not in before[0] and not _is_torchs(thread)]
    changed = [name for name, value in _settings()[1].items() if value != before[1].get(name, value)]
    module.cpu()
    data = Data()
    data.trainer = module.trainer
    loss: Any = module.training_step(next(iter(data.train_dataloader())), 0)
    module.zero_grad()
    loss.backward()
    return {
        "threads": left,
        "changed": changed,
        "without gradient": [name for name, p in module.named_parameters() if p.grad is None],
    }


def _settings() -> tuple[list[threading.Thread], dict[str, Any]]:
    return threading.enumerate(), {
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


def _is_torchs(thread: threading.Thread) -> bool:
    return thread.name.startswith(("pin_memory", "Dummy", "Thread-autograd"))


CASES: dict[str, Callable[[Kind, Path], Any]] = {
    case.__name__: case
    for case in (
        *(parameters, uneven, small, clipping, accumulation, schedulers, manual, scaler, bf16, batchnorm),
        *(sync_batchnorm, gradients, logging, logging_uneven, metrics, evaluation, predictions, replicas),
        *(reproducible, save, resume, error, cleanup),
    )
}
