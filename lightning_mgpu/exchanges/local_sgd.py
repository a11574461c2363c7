"""Local SGD and DiLoCo: replicas train locally, and synchronize their weights every H steps.

Local SGD (McMahan et al., 2017; Stich, 2019) continues from the mean of the replicas' weights.
DiLoCo (Douillard et al., 2023) passes the mean pseudo-gradient to an outer optimizer, SGD with
Nesterov momentum. Local SGD is the same with an outer learning rate of 1 and no momentum.

With a delay, training continues while pseudo-gradients are in flight, as in Streaming DiLoCo
(Douillard et al., 2025) and Overlap Local SGD (Wang et al., 2020).
"""

from collections.abc import Callable, Generator
from datetime import timedelta
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_mgpu.distributed.comm.buckets import Gradients
from lightning_mgpu.distributed.processes.consistency import INVARIANTS, crc_of
from lightning_mgpu.distributed.sharding.checksum import checksum
from lightning_mgpu.exchanges.check import path_of
from lightning_mgpu.exchanges.route import exact
from lightning_mgpu.exchanges.strategy import ExchangeStrategy
from lightning_mgpu.strategies.manual_allreduce import name_of

# torch 2.14 has made it public
set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout


def nesterov(mean: Tensor, state: Any, lr: float = 1.0, momentum: float = 0.0) -> Tensor:
    """The default outer optimizer. Returns what is subtracted from the synchronized weights."""
    if momentum:
        state["velocity"] = mean + momentum * state.get("velocity", 0)
        mean = mean + momentum * state["velocity"]
    return lr * mean


def exchange_and_step(
    exchange: Any, outer: Callable[[Tensor, Any], Tensor], pseudo_gradient: Tensor, state: Any
) -> Generator[Any, Any, Tensor]:
    """Exchange a pseudo-gradient, and apply the outer optimizer to the result."""
    mean = yield from exchange(pseudo_gradient, state)
    return outer(mean, state.setdefault("outer", {}))


class LocalSGDStrategy(ExchangeStrategy):
    """Local SGD and DiLoCo: local optimizer steps, and periodic synchronization of the weights.

    A *pseudo-gradient* is the last synchronized weights minus the local weights. An outer optimizer
    applies the mean of the replicas' pseudo-gradients to the synchronized weights.

    Args:
        sync_every: Number of optimizer steps between synchronizations (H in the papers).
        exchange, options: As for `ExchangeStrategy`, applied to pseudo-gradients.
        outer_step: The outer optimizer, a function or its dotted path. It receives the mean
            pseudo-gradient and a state dict, and returns what is subtracted from the synchronized
            weights. Default: SGD with Nesterov momentum.
        outer_lr, outer_momentum: Hyperparameters of the default outer optimizer.
        sync_delay: Pseudo-gradients are applied this many optimizer steps after they were sent,
            at most `sync_every` (tau in Streaming DiLoCo). Training continues meanwhile. Default:
            0, replicas wait.
        mix: With a `sync_delay`, a replica continues from `mix * local + (1 - mix) * synchronized`
            weights (alpha in Streaming DiLoCo), in [0, 1). Default: 0.5.
        parallel_devices, ...: As for `ManualAllreduceStrategy`. There is one replica per process.
    """

    invariants = INVARIANTS | {
        "since_last": "since the last synchronization of weights, process {process} had different "
        "batches, learning rates or trained parameters than process {rank}. Seed all processes "
        "equally, do not split a dataset by rank, and add sync_dist=True when logging a value "
        "that a scheduler reads.",
    }
    saves_optimizers = True
    flag_of_k = "devices"
    why_weights_differ = (
        "a callback that swaps weights around an evaluation (EMA), or by "
        f"{ExchangeStrategy.why_weights_differ}"
    )
    weights_are_equal = True  # in all replicas: after an exchange without a delay

    def __init__(
        self,
        sync_every: int = 16,
        exchange: Callable[..., Any] = exact,
        options: dict[str, Any] | None = None,
        outer_step: Callable[..., Any] | None = None,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        sync_delay: int = 0,
        mix: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(exchange, options, **kwargs)
        if not (isinstance(sync_every, int) and 1 <= sync_every <= 10**9):
            raise ValueError(f"{sync_every=}: must be a positive integer")
        if outer_step and (outer_lr, outer_momentum) != (1, 0):
            raise ValueError(
                "`outer_lr` and `outer_momentum`, set by exchange_diloco, configure the default "
                "`outer_step` only: use exchange_local_sgd"
            )
        if not 0 <= sync_delay <= sync_every:
            raise ValueError(f"{sync_delay=}: must be from 0 to {sync_every=}")
        if mix is not None and not (sync_delay and 0 <= mix < 1):
            raise ValueError(f"{mix=}: needs a `sync_delay`, and must be in [0, 1)")
        self.sync_every, self.outer_step = sync_every, outer_step
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum
        self.sync_delay, self.mix = sync_delay, 0.5 if mix is None and sync_delay else mix or 0.0

    def make_function(self) -> Callable[..., Any]:
        default = partial(nesterov, lr=self.outer_lr, momentum=self.outer_momentum)
        return partial(exchange_and_step, super().make_function(), self.outer_step or default)

    @property
    def description(self) -> str:
        outer = f"outer learning rate {self.outer_lr:g}, momentum {self.outer_momentum:g}"
        outer = f"outer step {name_of(self.outer_step)}" if self.outer_step else outer
        delay = f", delay {self.sync_delay}, mix {self.mix:g}" if self.sync_delay else ""
        return f"{super().description} every {self.sync_every} steps{delay}, {outer}"

    def name_function(self) -> str:
        outer = f", then outer step {path_of(self.outer_step)}," if self.outer_step else ""
        return super().name_function() + outer

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        averages = WeightAveraging, StochasticWeightAveraging
        callbacks: Any = vars(trainer)["callbacks"]
        has_average = any(isinstance(callback, averages) for callback in callbacks)
        if self._layer_sync is not None or has_average:
            raise MisconfigurationException(
                "Local SGD and DiLoCo do not support sync_batchnorm, or callbacks that average "
                "weights: remove them."
            )
        if self.sync_delay and self.root_device.type != "cpu":
            raise MisconfigurationException("`sync_delay` is supported on CPUs only: use 0.")
        if self.sync_delay and not self.is_single_process:
            set_timeout(timedelta(days=365), self.sync.group)  # `wait` has its own, on receipt

    def reset_states(self) -> None:
        super().reset_states()
        self._num_updates = self._invariants = 0  # since the last synchronization
        self._in_flight, self.weights_are_equal = False, True
        self._weights: Gradients = {}  # last synchronized

    @torch.no_grad()
    def exchange_gradients(self, gradients: Gradients, share: float) -> None:
        """Send nothing: the gradient is the mean over the local shard."""
        invariants = [shard.invariants for shard in self.shards]
        self._invariants = crc32(repr(invariants).encode(), self._invariants)
        sums = {p: torch.empty_like(p).copy_(g) for p, g in gradients.items()}
        self.set_sums(sums)

    def compute_share(self) -> float:
        return 1.0

    def gather_weights(self, weights: np.ndarray) -> np.ndarray:
        return weights

    def _find_trained(self) -> list[Tensor]:
        return [p for p in self.module.parameters() if p.requires_grad]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self._weights:  # before a closure changes them, as in SAM
            self._weights = {p: p.detach().clone() for p in self._find_trained()}
        return super().training_step(*args, **kwargs)

    def end_update(self) -> None:
        self._num_updates += 1
        self.weights_are_equal = False
        if self._num_updates == self.sync_delay:
            self._receive_pseudo_gradients()
        if self._num_updates == self.sync_every:
            self._send_pseudo_gradients() if self.sync_delay else self.exchange_weights()

    def on_train_end(self) -> None:
        self.exchange_weights()
        super().on_train_end()

    def teardown(self) -> None:
        super().teardown()
        self._in_flight, self.weights_are_equal = False, True  # a fit may have failed

    @torch.no_grad()
    def exchange_weights(self) -> None:
        """Make the weights of all replicas equal: an outer step, for which they wait."""
        if self.weights_are_equal or self.module.trainer.interrupted:
            return
        self._receive_pseudo_gradients()
        self.weights_are_equal, self._num_updates = True, 0
        self.has_run = False
        args = self._compute_pseudo_gradients(), "weights to exchange", self._sum_up(), True
        self._move_weights(self.sum_over_replicas(*args), mix=0)
        self._weights = {}

    @torch.no_grad()
    def _send_pseudo_gradients(self) -> None:
        """Send pseudo-gradients and invariants, without buffers."""
        self.sync.send(self._compute_pseudo_gradients(), self._sum_up())
        self._in_flight, self._num_updates = True, 0

    @torch.no_grad()
    def _receive_pseudo_gradients(self) -> None:
        """Wait for pseudo-gradients in flight, and apply the outer step."""
        if not self._in_flight:
            return
        self._in_flight = False
        self._move_weights(self.commit_states(self.sync.receive()), self.mix)

    def _compute_pseudo_gradients(self) -> Gradients:
        if {*self._find_trained()} != {*self._weights}:
            raise RuntimeError(
                "`requires_grad` has changed between two synchronizations of weights: change it "
                "right after an evaluation or a checkpoint."
            )
        return {p: (X - p) / self.world_size for p, X in self._weights.items()}

    def _sum_up(self) -> dict[str, int]:
        """Invariants since the last synchronization."""
        lrs = [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups]
        names = [name for name, p in self.module.named_parameters() if p in self._weights]
        invariants, self._invariants = self._invariants, 0
        return {"since_last": crc_of((invariants, checksum(lrs), names)), **self.batch_invariants()}

    def _move_weights(self, steps: Gradients, mix: float) -> None:
        """Update the synchronized weights X, and continue from them, or from a mix with them."""
        for p, step in steps.items():
            X = self._weights[p].sub_(step)
            p.copy_(X.lerp(p, mix) if mix else X)

    def sync_buffers(self) -> None:
        """Synchronize buffers with the weights only, not in every step."""
        if self.weights_are_equal:
            super().sync_buffers()

    def compare_weights(self) -> None:
        if self.weights_are_equal:
            super().compare_weights()

    def on_validation_start(self) -> None:
        self.exchange_weights()
        super().on_validation_start()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights of a checkpoint. All processes call this first, so they synchronize here."""
        self.exchange_weights()
        return super().lightning_module_state_dict()

    def get_settings(self) -> dict[str, Any]:
        names = ["sync_every", "outer_lr", "outer_momentum"]
        names += ["sync_delay", "mix"] if self.sync_delay else []
        own = {f"strategy.{name}": getattr(self, name) for name in names}
        outer = {"strategy.outer_step": path_of(self.outer_step) if self.outer_step else None}
        return {**super().get_settings(), **own, **outer}
