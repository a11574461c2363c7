"""What runs, in a few lines at the start of a run, and in the loggers' tables."""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.nn.parameter import is_lazy
from typing_extensions import override

from lightning_mgpu.data.batches import GlobalBatches
from lightning_mgpu.runs.devices import devices, in_words
from lightning_mgpu.runs.directory import run_directory


class RunHeader(Callback):
    """Prints model, strategy, batch, data and run directory when the first stage begins, and tells the loggers.

    `notes` are further lines by their label, which others may add until then.
    """

    def __init__(self) -> None:
        self.notes: dict[str, str] = {}
        self._printed = False

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._printed or trainer.sanity_checking:
            return
        self._printed = True
        batch_size, is_shared = batch_of(trainer)
        lines, facts = header(trainer, pl_module, batch_size)
        for logger in trainer.loggers:
            logger.log_hyperparams(facts)
        if trainer.is_global_zero:
            for label, text in {**lines, **self.notes}.items():
                print(f"{label + ':':<10}{text}", flush=True)
        if trainer.training and not is_shared:
            rank_zero_warn(
                f"each of the {trainer.world_size} processes takes batches of its own: make the loader with "
                "lightning_mgpu.data.batch_loader(dataset, batch_size, self.trainer, shuffle=True), which deals one "
                "batch out to all processes"
            )

    on_validation_start = on_test_start = on_predict_start = on_train_start


def header(
    trainer: Trainer, pl_module: LightningModule, batch_size: int | None
) -> tuple[dict[str, str], dict[str, Any]]:
    """What runs: the header's lines by label, and the same as columns of a table."""
    num_parameters = sum(p.numel() for p in pl_module.parameters() if not is_lazy(p))
    names = {"model_class": type(pl_module).__name__, "strategy": type(trainer.strategy).__name__}
    facts: dict[str, Any] = {**names, "num_parameters": num_parameters, "devices": in_words(devices(trainer))}
    lines = {
        "model": f"{names['model_class']}, {num_parameters:,} parameters, precision {trainer.precision}",
        "strategy": f"{names['strategy']} on {facts['devices']}",
    }
    if batch_size is not None:
        shares = getattr(trainer.strategy, "shares", [1.0] * len(devices(trainer)))
        facts |= {"global_batch_size": batch_size, "per_device_batch_size": per_device(batch_size, shares)}
        lines["batch"] = f"{batch_size} global, {facts['per_device_batch_size']} per device"
    if (data := trainer.datamodule) is not None:  # type: ignore[attr-defined]
        sizes = {stage: getattr(data, f"{stage}_indices", None) for stage in ("train", "val", "test")}
        shown = ", ".join(f"{len(indices):,} {stage}" for stage, indices in sizes.items() if indices is not None)
        lines["data"] = "; ".join(filter(None, [f"{type(data).__name__} {shown}".strip(), getattr(data, "origin", "")]))
    if directory := run_directory(trainer):
        lines["run"] = str(directory)
    return lines, facts


def batch_of(trainer: Trainer) -> tuple[int | None, bool]:
    """The samples of a batch in all processes, where the loader knows them, and whether the processes share it."""
    combined = trainer._active_loop._combined_loader  # type: ignore[union-attr]
    if combined is None:  # a search prints the header before there is a loader
        return getattr(trainer.datamodule, "batch_size", None), True  # type: ignore[attr-defined]
    samplers: list[Any] = [getattr(loader, "sampler", None) for loader in combined.flattened]
    if all(isinstance(sampler, GlobalBatches) for sampler in samplers):
        return samplers[0].batch_size, True
    own = getattr(combined.flattened[0], "batch_size", None)
    return own and own * trainer.world_size, trainer.world_size == 1


def per_device(batch_size: int, shares: Sequence[float]) -> str:
    """The samples of a global batch each device gets: '128', '85 to 86', or '179 and 77' for uneven shares."""
    if len(set(shares)) > 1:
        return " and ".join(str(round(batch_size * share / sum(shares))) for share in shares)
    least, rest = divmod(batch_size, len(shares))
    return f"{least} to {least + 1}" if rest else str(least)
