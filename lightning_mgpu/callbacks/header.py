"""A few lines about a run at its start, and the same in the loggers' tables."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_mgpu.data.batches import GlobalBatchSampler
from lightning_mgpu.devices import describe_devices, devices, is_sharded
from lightning_mgpu.protocols import data_facts, strategy_facts
from lightning_mgpu.runs.directory import make_run_dir_on_rank_zero
from lightning_mgpu.runs.run_json import count_parameters


class RunHeader(Callback):
    """Prints model, strategy, batch, data and run directory when a run starts, and logs them.

    `notes` has further lines, label -> text, which others may add before that.
    """

    def __init__(self) -> None:
        self.notes: dict[str, str] = {}
        self._has_printed = False
        self._num_parameters_before_sharding: int | None = None

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # this is the last hook before FSDP splits the parameters, but configure_model comes later
        if not is_overridden("configure_model", pl_module):
            self._num_parameters_before_sharding = count_parameters(pl_module)

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._has_printed or trainer.sanity_checking:
            return
        self._has_printed = True
        num_parameters = (
            self._num_parameters_before_sharding
            if is_sharded(trainer)
            else count_parameters(pl_module)
        )
        facts: dict[str, Any] = {
            "model_class": type(pl_module).__name__,
            "strategy": describe_strategy(trainer),
            "num_parameters": num_parameters,
            "devices": describe_devices(devices(trainer)),
        }
        size = "sharded" if num_parameters is None else f"{num_parameters:,}"
        lines = {
            "model": f"{facts['model_class']}, {size} parameters, precision {trainer.precision}",
            "strategy": f"{facts['strategy']} on {facts['devices']}",
        }
        if (batch_size := global_batch_size(trainer)) is not None:
            share, unit = share_of(batch_size, trainer)
            facts |= {"global_batch_size": batch_size, f"per_{unit}_batch_size": share}
            lines["batch"] = f"{batch_size} global, {share} per {unit}"
        if (data := trainer.datamodule) is not None:  # type: ignore[attr-defined]
            lines["data"] = f"{type(data).__name__} {data_facts(trainer).summary}".strip()
        if directory := make_run_dir_on_rank_zero(trainer):
            lines["run"] = str(directory)
        if trainer.ckpt_path:
            lines["ckpt"] = str(trainer.ckpt_path)
        for logger in trainer.loggers:
            logger.log_hyperparams(facts)
        if trainer.is_global_zero:
            for label, text in {**lines, **self.notes}.items():
                print(f"{label + ':':<10}{text}", flush=True)

    on_validation_start = on_test_start = on_predict_start = on_train_start


def describe_strategy(trainer: Trainer) -> str:
    """`DDPStrategy`; `ManualAllreduceStrategy (ring_allreduce)`."""
    name = type(trainer.strategy).__name__
    if allreduce := strategy_facts(trainer.strategy).allreduce:
        name += f" ({getattr(allreduce, '__name__', type(allreduce).__name__)})"
    return name


def global_batch_size(trainer: Trainer) -> int | None:
    """The size of a batch, summed over processes; `None` if the loader does not know it.

    Warns if it trains and processes do not share a batch.
    """
    loader = trainer._active_loop._combined_loader.flattened[0]  # type: ignore[union-attr]
    if isinstance(sampler := getattr(loader, "sampler", None), GlobalBatchSampler):
        return sampler.batch_size
    if trainer.training and trainer.world_size > 1:
        rank_zero_warn(
            f"each of the {trainer.world_size} processes takes batches of its own: make the loader "
            "with lightning_mgpu.data.batch_loader(dataset, batch_size, self.trainer, "
            "shuffle=True), which deals one batch out to all processes"
        )
    process_batch_size = getattr(loader, "batch_size", None)
    return process_batch_size and process_batch_size * trainer.world_size


def share_of(batch_size: int, trainer: Trainer) -> tuple[str, str]:
    """How many samples of a global batch each device gets on average, and its unit.

    ('128', 'device'), ('179.2 and 76.8', 'device'), ('64', 'replica') if a device has several.
    """
    facts = strategy_facts(trainer.strategy)
    shares = facts.shares or [1.0] * len(devices(trainer))
    num_devices = len(facts.given_devices or shares)
    sizes = dict.fromkeys(f"{round(batch_size * share / sum(shares), 1):g}" for share in shares)
    return " and ".join(sizes), "replica" if len(shares) > num_devices else "device"
