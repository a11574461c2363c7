"""What Lightning leaves out of a checkpoint, and a run needs to go on as if it had never stopped.

Random numbers, the metrics of an epoch under way, and how much of `metrics.csv` had been written. Every process has its
own; the first one writes those of all. Under another number of processes the metrics are put together, and random
numbers begin anew.
"""

from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.utilities.seed import _collect_rng_states, _set_rng_states
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torchmetrics import Metric

from lightning_mgpu.callbacks.predictions import gather_lists
from lightning_mgpu.tracking.csv_logger import MetricsWriter, RunCSVLogger

State = dict[str, Any]
REDUCTIONS: dict[str, Callable] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}


def collect(trainer: Trainer, pl_module: LightningModule) -> State:
    """The state of all processes, in plain types and tensors; every process has to call this."""
    own = {"random": _random(trainer), "metrics": _metrics(pl_module), "logged": _logged(trainer)}
    callback_metrics = {name: value.detach().cpu() for name, value in trainer.callback_metrics.items()}
    return {"processes": gather_lists([own]), "rows": _flush(trainer), "callback_metrics": callback_metrics}


def restore(trainer: Trainer, pl_module: LightningModule, state: State) -> State:
    """Take the state up again, when all is set up; returns logged values, to be added with `add_logged`."""
    processes = state["processes"]
    trainer._logger_connector._callback_metrics.update(state["callback_metrics"])  # type: ignore[attr-defined]
    if len(processes) == trainer.world_size:
        own = processes[trainer.global_rank]
        _set_random(trainer, own["random"])
        _set_metrics(pl_module, [own["metrics"]])
        return own["logged"]
    if not trainer.is_global_zero:  # type: ignore[attr-defined]
        return {}
    _set_metrics(pl_module, [process["metrics"] for process in processes])
    return _merge_logged([process["logged"] for process in processes])


def truncate_log(trainer: Trainer, num_rows: int) -> None:
    """Drop the rows of `metrics.csv` that will be written again."""
    if (writer := _writer(trainer)) is not None:
        writer.go_on_after(num_rows)


def add_logged(trainer: Trainer, saved: State) -> None:
    """Add what `self.log(..., on_epoch=True)` had summed up to what it sums up now, once there is something."""
    results = trainer.fit_loop.epoch_loop._results
    for key in [key for key in saved if key in results]:
        result, before = results[key], saved.pop(key)
        result._computed = None
        for name, value in before["state"].items():
            now = getattr(result, name)
            setattr(result, name, _reduce([value.to(now), now], name, before["reduce"]))


def _random(trainer: Trainer) -> State:
    state = _collect_rng_states()
    name, keys, *rest = state["numpy"]
    state["numpy"] = [name, torch.from_numpy(keys.astype("int64")), *rest]
    version, numbers, gauss = state["python"]
    state["python"] = [version, list(numbers), gauss]
    return state


def _set_random(trainer: Trainer, state: State) -> None:
    state = dict(state)
    name, keys, *rest = state["numpy"]
    state["numpy"] = (name, keys.numpy().astype("uint32"), *rest)
    if len(state["torch.cuda"]) != torch.cuda.device_count():
        state["torch.cuda"] = []
    state.pop("replicas", None)  # of a run of before
    _set_rng_states(state)


def _metrics(pl_module: LightningModule) -> State:
    """The sums behind torchmetrics objects, which are no part of a module's state_dict."""
    return {
        name: {
            "update_count": metric._update_count,
            "state": {key: _cpu(getattr(metric, key)) for key in metric._defaults},
        }
        for name, metric in pl_module.named_modules()
        if isinstance(metric, Metric) and metric._update_count
    }


def _set_metrics(pl_module: LightningModule, processes: list[State]) -> None:
    for name, metric in pl_module.named_modules():
        saved = [process[name] for process in processes if name in process]
        if not isinstance(metric, Metric) or not saved:
            continue
        metric._update_count = sum(one["update_count"] for one in saved)
        metric._computed = None
        for key, reduction in metric._reductions.items():
            values = [one["state"][key] for one in saved]
            value = values[0]
            if isinstance(value, list):  # of tensors to be concatenated
                value = [tensor.to(metric.device) for tensors in values for tensor in tensors]
            elif len(values) > 1:
                value = reduction(torch.stack(values)) if callable(reduction) else torch.stack(values)
            setattr(metric, key, value.to(metric.device) if isinstance(value, Tensor) else value)


def _logged(trainer: Trainer) -> State:
    """What `self.log(..., on_epoch=True)` has summed up in this epoch."""
    return {
        key: {
            "state": {name: _cpu(getattr(result, name)) for name in result._defaults},
            "reduce": "max" if result.meta.is_max_reduction else "min" if result.meta.is_min_reduction else "sum",
        }
        for key, result in trainer.fit_loop.epoch_loop._results.items()
        if result.is_tensor and result.meta.on_epoch and not result.has_reset
    }


def _merge_logged(processes: list[State]) -> State:
    merged: State = {}
    for key in {key for process in processes for key in process}:
        parts = [process[key] for process in processes if key in process]
        reduce = parts[0]["reduce"]
        names = parts[0]["state"]
        state = {name: _reduce([part["state"][name] for part in parts], name, reduce) for name in names}
        merged[key] = {"state": state, "reduce": reduce}
    return merged


def _reduce(values: list[Tensor], name: str, reduce: str) -> Tensor:
    return REDUCTIONS[reduce if name == "value" else "sum"](torch.stack(values), dim=0)


def _flush(trainer: Trainer) -> int:
    """The number of rows in `metrics.csv`, all of them on disk."""
    writer = _writer(trainer)
    return writer.flush() if writer is not None else 0


def _writer(trainer: Trainer) -> MetricsWriter | None:
    if not trainer.is_global_zero:  # type: ignore[attr-defined]
        return None
    return next((logger.experiment for logger in trainer.loggers if isinstance(logger, RunCSVLogger)), None)


def _cpu(value: Any) -> Any:
    return [tensor.detach().cpu() for tensor in value] if isinstance(value, list) else value.detach().cpu()
