"""Lightning's demands besides training: launchers, and a strategy's part of a checkpoint."""

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

MAX_DEVICES = 64
KEY = "lightning_mgpu_strategy"  # in a checkpoint


class OneProcess:
    """A strategy of one process, whatever the number of its devices, and the environment."""

    name = "this strategy"
    num_nodes = 1  # the Trainer sets the number that was asked for
    parallel_devices: list[torch.device] | None
    cluster_environment: Any
    node_rank = 0
    is_distributed = False
    # the whole batch comes from here
    distributed_sampler_kwargs = {"num_replicas": 1, "rank": 0}  # noqa: RUF012

    def check_launch(self) -> None:
        """Refuse torchrun and SLURM with several processes, several nodes, and too many devices."""
        processes = 1
        # no launcher, or one that has launched nothing
        with contextlib.suppress(AttributeError, KeyError):
            processes = self.cluster_environment.world_size()
        if processes > 1 or self.num_nodes > 1:
            what = f"{processes} were launched (torchrun, SLURM)"
            what = what if processes > 1 else f"num_nodes={self.num_nodes}"
            raise MisconfigurationException(
                f"{self.name} drives all its devices from one process on one node, but {what}: use "
                "--trainer.strategy=ddp for several processes, or start a single one."
            )
        if (count := len(self.parallel_devices or [])) > MAX_DEVICES:
            raise MisconfigurationException(
                f"{count} devices are too many: {self.name} takes up to {MAX_DEVICES}."
            )

    def state_dict(self) -> dict[str, Any]:
        """The state of a subclass between steps, as tensors and plain values.

        It is saved in checkpoints.
        """
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back the state, perhaps on another number of devices. Tensors are on the CPU."""

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if "optimizer_states" in checkpoint and (state := self.state_dict()):
            checkpoint[KEY] = {type(self).__qualname__: state}
        super().save_checkpoint(checkpoint, *args, **kwargs)  # type: ignore[misc]

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]
        if (state := checkpoint.get(KEY, {}).get(type(self).__qualname__)) is not None:
            self.load_state_dict(state)
