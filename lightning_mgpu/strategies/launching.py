"""Lightning's demands besides training: processes, and a strategy's part of a checkpoint.

Processes are started by torchrun, by SLURM, or by Lightning, which runs the script once more for
each. Every process runs the same Trainer, whose world size stays 1. Only who writes files differs.
"""

import atexit
import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_mgpu.strategies.processes import Processes

MAX_DEVICES = 64
SETUP_SECONDS = 1800.0  # in which one process may prepare data; as long as `ddp` waits
JOIN_SECONDS = 300.0  # until all processes have started
KEY = "lightning_mgpu_strategy"  # in a checkpoint


@cache
def all_processes(rank: int, num: int) -> Processes:
    """Meet the other processes, once for all Trainers of the script."""
    limit = timedelta(seconds=JOIN_SECONDS)
    store, *_ = next(iter(dist.rendezvous("env://", rank, num, timeout=limit)))
    home = torch.device("cpu")
    processes = Processes(home, rank, num, store=dist.PrefixStore("lightning_mgpu", store))
    atexit.register(processes.close)  # before Python ends, which gloo's threads must not see
    return processes


def refuse_process_groups() -> None:
    """Metrics and loggers would add up over processes what each of them has as a whole."""
    if dist.is_initialized():
        raise RuntimeError(
            "torch.distributed has a process group, by which metrics would count every sample once "
            "per process: leave init_process_group out, as the processes of this strategy find "
            "each other."
        )


class Launching:
    """The processes of a strategy, the devices of each, and the environment."""

    name = "this strategy"
    takes_processes = True  # whether there may be several
    processes_asked_for: int | None = None  # per node, without a launcher
    seconds = 60.0  # how long a process waits for another one
    num_nodes = 1  # the Trainer sets the number that was asked for
    num_processes = 1  # per node
    node_devices: list[torch.device] | None = None  # of all processes of this node
    parallel_devices: list[torch.device] | None  # of this process
    num_replicas: int | None = None  # in all processes; None for one per device
    split: list[float] | Literal["auto"] | None = None  # shares of the batch, one per device
    cluster_environment: Any
    processes = Processes(torch.device("cpu"))  # a single one, until all have met
    is_distributed = False
    _launcher: Any  # Lightning's
    # the whole batch comes from here
    distributed_sampler_kwargs = {"num_replicas": 1, "rank": 0}  # noqa: RUF012

    @property
    def num_all_processes(self) -> int:
        return self.num_processes * self.num_nodes

    def _ask_rank(self, name: str) -> int:
        """This process's `global_rank`, `local_rank` or `node_rank`."""
        several = self.num_all_processes > 1
        return getattr(self.cluster_environment, name)() if several else 0

    @property
    def process_rank(self) -> int:
        """The number of this process."""
        return self._ask_rank("global_rank")

    @property
    def node_rank(self) -> int:
        return self._ask_rank("node_rank")

    @property
    def given_devices(self) -> list[torch.device]:
        """Those of all processes."""
        return (self.node_devices or self._own_devices) * self.num_nodes

    @property
    def _own_devices(self) -> list[torch.device]:
        return self.parallel_devices or [torch.device("cpu")]

    @property
    def devices_here(self) -> list[torch.device]:
        """One per replica of this process."""
        num_devices = len(self.given_devices)
        count = (self.num_replicas or num_devices) // num_devices
        return [device for device in self._own_devices for _ in range(count)]

    @property
    def devices(self) -> list[torch.device]:
        """One per replica. Those of other processes' replicas arrive on this one's first device."""
        here, rank, num = self.devices_here, self.process_rank, self.num_all_processes
        there = [self._own_devices[0]] * len(here)
        return [device for i in range(num) for device in (here if i == rank else there)]

    def set_world_ranks(self) -> None:
        """Find out which process this is, and which devices it has. The Trainer asks for it."""
        environment = self.cluster_environment
        if isinstance(environment, LightningEnvironment):
            self.num_processes = self.processes_asked_for or 1
            environment.set_world_size(self.num_all_processes)
            rank = self._ask_rank("node_rank") * self.num_processes + self._ask_rank("local_rank")
            environment.set_global_rank(rank)
        else:
            with suppress(AttributeError, KeyError):  # of one that has launched nothing
                self.num_processes = environment.world_size() // self.num_nodes or 1
        rank_zero_only.rank = self.process_rank  # type: ignore[attr-defined]
        if self.node_devices is None and self.takes_processes:
            self.node_devices = self.parallel_devices or []
            count = len(self.node_devices) // self.num_processes
            start = self._ask_rank("local_rank") * count
            self.parallel_devices = self.node_devices[start : start + count]

    def _configure_launcher(self) -> None:
        if self.num_all_processes > 1 and self.takes_processes:
            self.check_launch()  # before processes are started
            self._launcher = _SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    def check_launch(self) -> None:
        """Refuse what processes and devices do not fit."""
        num, given = self.num_processes, self.node_devices or self.parallel_devices or []
        asked_for = self.processes_asked_for
        if self.num_all_processes > 1 and not self.takes_processes:
            raise MisconfigurationException(
                f"{self.name} drives all its devices from one process, but there are "
                f"{self.num_all_processes}: use --trainer.strategy=manual_allreduce, or ddp."
            )
        if asked_for is not None and asked_for != num:
            raise MisconfigurationException(
                f"processes={asked_for}, but {num} per node were started (torchrun, SLURM): leave "
                "the option out."
            )
        if len(given) % num:
            raise MisconfigurationException(
                f"{len(given)} device(s) cannot be shared out among the {num} processes of this "
                "node: choose a multiple of them (--trainer.devices)."
            )
        if len(given) > MAX_DEVICES:
            raise MisconfigurationException(
                f"{len(given)} devices are too many: {self.name} takes up to {MAX_DEVICES}."
            )
        devices, split, count = self.given_devices, self.split, self.num_replicas
        num_devices = len(devices)
        are_mixed = len({device.type for device in devices}) > 1
        if count is not None and (count < 1 or count % num_devices or split or are_mixed):
            raise MisconfigurationException(
                f"replicas={count}: choose a multiple of the {num_devices} device(s), which must "
                "be of one kind, and leave `split` out."
            )
        shares = split if isinstance(split, list) and len(split) == num_devices else [0.0]
        if split not in (None, "auto") and not all(0 < s < float("inf") for s in shares):
            raise MisconfigurationException(
                f"split={split!r}: give 'auto', or one positive share per device ({num_devices})."
            )
        if (split or are_mixed) and self.num_all_processes > 1:
            raise MisconfigurationException(
                f"{self.num_all_processes} processes: leave `split` out, and give devices of one "
                "kind."
            )

    def join_processes(self, home: torch.device) -> None:
        """Meet the other processes, of which messages come to the device `home`."""
        if (num := self.num_all_processes) == 1:
            return
        environment = self.cluster_environment
        os.environ["MASTER_ADDR"] = str(environment.main_address)
        os.environ["MASTER_PORT"] = str(environment.main_port)
        self.processes = all_processes(self.process_rank, num)
        self.processes.home, self.processes.seconds = home, self.seconds

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other processes."""
        self.processes.fail(exception)
        super().on_exception(exception)  # type: ignore[misc]

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
