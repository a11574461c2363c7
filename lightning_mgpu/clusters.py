"""Several machines: what torchrun, SLURM or plain environment variables say of them, before the Trainer looks.

    torchrun --nnodes=2 ... -m lightning_mgpu fit       # num_nodes and devices are torchrun's
    srun python -m lightning_mgpu fit                   # are SLURM's
    NODE_RANK=1 MASTER_ADDR=... MASTER_PORT=... python -m lightning_mgpu fit --trainer.num_nodes=2

In the last form Lightning starts the other processes of a machine; a process finds its machine in NODE_RANK.
"""

import os

from jsonargparse import Namespace
from lightning.pytorch.accelerators import AcceleratorRegistry, CUDAAccelerator
from lightning.pytorch.plugins.environments import LSFEnvironment, MPIEnvironment, TorchElasticEnvironment
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.connectors.accelerator_connector import _select_auto_accelerator
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn

from lightning_mgpu.checks import check_devices, find_strategy
from lightning_mgpu.errors import UsageError
from lightning_mgpu.slurm import is_slurm_job
from lightning_mgpu.strategies.train_batch import TrainBatchStrategy


def set_rank() -> None:
    """Tell processes of the second and later machines, started without a launcher, that they are not the first.

    Until there is a Trainer, Lightning looks at RANK, LOCAL_RANK and SLURM_PROCID alone.
    """
    if not _is_launched() and _number("NODE_RANK", 0) > 0:
        rank_zero_only.rank = max(1, rank_zero_only.rank)  # type: ignore[attr-defined]


def follow_launcher(config: Namespace) -> None:
    """Take the Trainer's `num_nodes` and `devices` from torchrun or SLURM where nobody gave any.

    Raises:
        UsageError: If environment variables contradict the configuration: processes would wait for each other for
            ever, or each machine would train on its own.
    """
    if TorchElasticEnvironment.detect():
        per_node = _number("LOCAL_WORLD_SIZE", 1)
        num_nodes = _number("WORLD_SIZE", 1) // per_node
    elif is_slurm_job():
        num_nodes = _number("SLURM_NNODES", 1)
        # the former is there if `--ntasks-per-node` was given
        per_node = _number("SLURM_NTASKS_PER_NODE", max(1, _number("SLURM_NTASKS", 1) // num_nodes))
    else:
        if not (LSFEnvironment.detect() or MPIEnvironment.detect()):  # Lightning asks jsrun and mpirun itself
            _check_plain_environment(config)
        return
    if config.num_nodes == 1:
        config.num_nodes = num_nodes
    if config.devices == "auto" and not _is_one_process(config.strategy):
        check_devices(config)
        if is_slurm_job() and (here := num_devices(config)) > per_node:
            rank_zero_warn(
                f"SLURM starts {per_node} of this on a machine of {here} devices, and each trains on one: take "
                f"--ntasks-per-node={here}, or --trainer.strategy=manual_allreduce for all of them in one process"
            )
        config.devices = per_node


def num_devices(config: Namespace) -> int:
    """The devices of one machine, by the Trainer's `accelerator`, `devices` and `strategy`."""
    if not isinstance(config.strategy, str) and (own := config.strategy.get("init_args.parallel_devices")):
        return len(own)
    name = _select_auto_accelerator() if config.accelerator == "auto" else config.accelerator
    if name == "gpu":
        name = "cuda" if CUDAAccelerator.is_available() else "mps"
    accelerator = AcceleratorRegistry.get(name)
    devices = accelerator.auto_device_count() if config.devices == "auto" else config.devices
    return len(accelerator.get_parallel_devices(accelerator.parse_devices(devices)))


def _is_one_process(strategy: str | Namespace) -> bool:
    """Whether a strategy drives all devices of a machine from one process."""
    found = find_strategy(strategy if isinstance(strategy, str) else strategy.class_path)
    if isinstance(found, str) and found.lower() in StrategyRegistry:
        found = StrategyRegistry[found.lower()]["strategy"]
    return isinstance(found, type) and issubclass(found, TrainBatchStrategy)


def _check_plain_environment(config: Namespace) -> None:
    if config.plugins:  # a cluster environment of one's own
        return
    rank, num_nodes = _number("NODE_RANK", 0), config.num_nodes
    if rank >= num_nodes:
        raise UsageError(
            f"NODE_RANK={rank}, but --trainer.num_nodes={num_nodes}: it counts the machines; NODE_RANK begins at 0"
        )
    needed = [name for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if num_nodes > 1 and needed:
        raise UsageError(
            f"--trainer.num_nodes={num_nodes} needs {', '.join(needed)} in every machine's environment, or torchrun or "
            "srun to start it"
        )
    if "WORLD_SIZE" in os.environ and "LOCAL_RANK" not in os.environ:
        check_devices(config)
        num_processes = num_nodes * num_devices(config)
        if (given := _number("WORLD_SIZE", 1)) != num_processes:
            raise UsageError(
                f"WORLD_SIZE={given}, but --trainer.num_nodes={num_nodes} and --trainer.devices="
                f"{config.devices} make {num_processes}: let them agree, or leave WORLD_SIZE out"
            )
    if "RANK" in os.environ and "NODE_RANK" not in os.environ and _number("RANK", 0) > 0:
        raise UsageError(
            f"RANK={os.environ['RANK']} without torchrun: say which machine this is with NODE_RANK, and leave RANK out"
        )


def _is_launched() -> bool:
    """Whether torchrun or SLURM started this process, which then has its global rank."""
    return TorchElasticEnvironment.detect() or is_slurm_job()


def _number(name: str, default: int) -> int:
    value = os.environ.get(name, str(default))
    if not value.isdigit():
        raise UsageError(f"{name}={value} in the environment: expected a whole number")
    return int(value)
