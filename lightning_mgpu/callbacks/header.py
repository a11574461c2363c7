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
        lines, facts = header(trainer, pl_module)
        for logger in trainer.loggers:
            logger.log_hyperparams(facts)
        if trainer.is_global_zero:
            for label, text in {**lines, **self.notes}.items():
                print(f"{label + ':':<10}{text}", flush=True)
        if trainer.training and trainer.world_size > 1 and not has_global_batches(trainer):
            rank_zero_warn(
                f"each of the {trainer.world_size} processes takes batches of its own: make the loader with "
                "lightning_mgpu.data.batch_loader(dataset, batch_size, self.trainer, shuffle=True), which deals one "
                "batch out to all processes"
            )

    on_validation_start = on_test_start = on_predict_start = on_train_start


def header(trainer: Trainer, pl_module: LightningModule) -> tuple[dict[str, str], dict[str, Any]]:
    """What runs: the header's lines by label, and the same as columns of a table."""
    num_parameters = sum(p.numel() for p in pl_module.parameters() if not is_lazy(p))
    names = {"model_class": type(pl_module).__name__, "strategy": type(trainer.strategy).__name__}
    facts: dict[str, Any] = {**names, "num_parameters": num_parameters, "devices": in_words(devices(trainer))}
    lines = {
        "model": f"{names['model_class']}, {num_parameters:,} parameters, precision {trainer.precision}",
        "strategy": f"{names['strategy']} on {facts['devices']}",
    }
    if (batch_size := global_batch_size(trainer)) is not None:
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


def loaders(trainer: Trainer) -> list[Any]:
    """The loaders of the stage that runs; none before it begins."""
    combined = trainer._active_loop._combined_loader  # type: ignore[union-attr]
    return combined.flattened if combined is not None else []


def has_global_batches(trainer: Trainer) -> bool:
    """Whether processes share the batches; of a plain `DataLoader` everyone gets batches of its own."""
    return all(isinstance(getattr(loader, "sampler", None), GlobalBatches) for loader in loaders(trainer))


def global_batch_size(trainer: Trainer) -> int | None:
    """The samples of a batch, those of all processes together, where the loader knows them."""
    if not (found := loaders(trainer)):  # a search prints the header before there is a loader
        return getattr(trainer.datamodule, "batch_size", None)  # type: ignore[attr-defined]
    sampler, own = getattr(found[0], "sampler", None), getattr(found[0], "batch_size", None)
    if isinstance(sampler, GlobalBatches):
        return sampler.batch_size
    return own * trainer.world_size if own else None


def per_device(batch_size: int, shares: Sequence[float]) -> str:
    """The samples of a global batch each device gets: '128', '85 to 86', or '179 and 77' for uneven shares."""
    if len(set(shares)) > 1:
        return " and ".join(str(round(batch_size * share / sum(shares))) for share in shares)
    least, rest = divmod(batch_size, len(shares))
    return f"{least} to {least + 1}" if rest else str(least)
