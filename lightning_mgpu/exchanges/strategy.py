"""`manual_allreduce` with an exchange of one's own in the place of the allreduce."""

from collections import ChainMap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import LBFGS

from lightning_mgpu.allreduce import textbook_allreduce
from lightning_mgpu.exchanges.check import check_exchange, path_of
from lightning_mgpu.exchanges.local_sgd import exchange_and_step, nesterov
from lightning_mgpu.exchanges.rounds import RoundsStrategy
from lightning_mgpu.exchanges.runner import exact
from lightning_mgpu.shards.checksum import checksum
from lightning_mgpu.strategies.buffers import read_buffers
from lightning_mgpu.strategies.window import Gradients

KEY, LAST = "exchange", "last.ckpt"  # in a checkpoint; the only file with states, which are large


class ExchangeStrategy(RoundsStrategy):
    """Replicas that are kept equal by an exchange: a generator that sends what it yields.

    Args:
        exchange: One replica's side (see `lightning_mgpu.exchanges`), or its dotted path.
        options: Arguments of the exchange, by name.
        every: H. Each replica updates itself by its own shard's gradient, and after H updates the
            exchange gets the differences of the weights. Left out: it gets all gradients.
        outer: For `every`: a function of the mean difference of the weights and of a state, which
            returns what is subtracted from the last common weights; or its dotted path.
        outer_lr, outer_momentum: Of the step of SGD with Nesterov momentum that is the default.
        replicas, ...: As for `ManualAllreduceStrategy`.
    """

    why_weights_differ = (
        "an exchange whose result depends on the replica or draws unseeded numbers, "
        f"{RoundsStrategy.why_weights_differ}"
    )

    def __init__(
        self,
        exchange: Callable[..., Any] = exact,
        options: dict[str, Any] | None = None,
        every: int | None = None,
        outer: Callable[..., Any] | None = None,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if self.allreduce is not textbook_allreduce or (every is not None and every < 1):
            raise ValueError(f"{every=}: it is 1 or more; and an exchange takes no `allreduce`")
        if (outer or not every) and (outer_lr, outer_momentum) != (1, 0):
            raise ValueError("`outer_lr` and `outer_momentum` need `every`, and no `outer`")
        if outer and not every:
            raise ValueError("`outer` needs `every`")
        self.exchange, self.options, self.every = exchange, options or {}, every
        self.outer, self.outer_lr, self.outer_momentum = outer, outer_lr, outer_momentum
        self._num_updates = 0  # since the last exchange of weights

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.module.trainer.state.fn != TrainerFn.FITTING:
            return
        self._function: Any = partial(self.exchange, **self.options)
        if self.every:
            default = partial(nesterov, lr=self.outer_lr, momentum=self.outer_momentum)
            outer = self.outer or default
            self._function = partial(exchange_and_step, self._function, outer)
        with self.precision_plugin.module_init_context():
            dtype = torch.get_default_dtype()
        # before a callback makes a run directory
        has_state = check_exchange(self._function, self.exchange, self.root_device, dtype)
        self._is_stateful = bool(self.every) or has_state

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        has_scaler = getattr(self.precision_plugin, "scaler", None) is not None
        has_lbfgs = any(isinstance(each, LBFGS) for each in self.optimizers)
        is_wrong = has_scaler or has_lbfgs or not self.module.automatic_optimization
        averages = WeightAveraging, StochasticWeightAveraging
        callbacks: Any = vars(trainer)["callbacks"]
        has_average = any(isinstance(each, averages) for each in callbacks)
        is_apart = self.num_local > 1 or self._layer_sync is not None or has_average
        if (self.every and is_apart) or (self._is_stateful and is_wrong):
            raise MisconfigurationException(
                "`every`, and an exchange that keeps a state, need automatic optimization, no "
                "LBFGS, and no GradScaler: bf16-mixed in place of 16-mixed. `every` also needs one "
                "replica per process, no sync_batchnorm, and no callback that averages weights."
            )
        self.reset_rounds()
        self._num_updates = self._facts = 0
        self._weights: Gradients = {}  # the last common ones

    @torch.no_grad()
    def exchange_gradients(self, replicas: list[Gradients], shares: list[float]) -> None:
        """Leave what the exchange returns in the `grad` of every parameter."""
        if self.every:  # the mean over this replica's own shard
            facts = [each.facts for each in self.passes()]
            self._facts = crc32(repr(facts).encode(), self._facts)
            sums = {p: torch.empty_like(p).copy_(g) for p, g in replicas[0].items()}
        else:
            layout = self.find_layout()
            trained = [p.requires_grad for p in layout]
            layout_sum = crc32(repr((*layout.values(), trained)).encode())
            sums = self.exchange_all(layout, replicas, "gradients", parameters=layout_sum)
        self.set_sums(sums)
        self.num_bytes[1] += sum(p.nbytes for p in (sums if self.every else layout))

    def find_shares(self) -> list[float]:
        return [1.0] if self.every else super().find_shares()

    def gather_weights(self, weights: np.ndarray) -> np.ndarray:
        return weights if self.every else super().gather_weights(weights)

    def _find_trained(self) -> list[Tensor]:
        return [p for p in self.module.parameters() if p.requires_grad]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.every and not self._weights:  # before a closure moves them, as SAM's do
            self._weights = {p: p.detach().clone() for p in self._find_trained()}
        return super().training_step(*args, **kwargs)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        self._num_updates += 1
        if self._num_updates == self.every:
            self.exchange_weights()
        if (trainer := self.module.trainer).is_last_batch:
            values = dict(zip(("exchange_mb", "exact_mb"), (self.num_bytes / 1e6).tolist()))
            for logger in trainer.loggers:
                logger.log_metrics({**values, "epoch": trainer.current_epoch}, trainer.global_step)
        return output

    def on_train_end(self) -> None:
        self.exchange_weights()
        super().on_train_end()
        if self.is_global_zero:
            sent, by_exact = self.num_bytes / 1e6
            how = path_of(self.exchange).rpartition(".")[2]
            print(f"exchange: {sent:.2f} MB per replica by {how}, {by_exact:.2f} by the exact sum")

    @torch.no_grad()
    def exchange_weights(self) -> None:
        """With `every`: an outer step, if there was an update since the last one."""
        if not self.every or not self._num_updates:
            return
        self._num_updates = 0
        if {*self._find_trained()} != {*self._weights}:
            raise RuntimeError("Between two exchanges of weights, `requires_grad` must not change.")
        differences = {p: (X - p) / self.num_replicas for p, X in self._weights.items()}
        self._buffers = [each for each in [read_buffers(self.module)] if len(each)]
        lrs = [group["lr"] for each in self.optimizers for group in each.param_groups]
        names = [name for name, p in self.module.named_parameters() if p in differences]
        since_last = crc32(repr((self._facts, checksum(lrs), names)).encode())
        self._facts = 0
        steps = self.exchange_all(
            differences, [differences], "weights to exchange", since_last=since_last
        )
        for p, step in steps.items():
            p.copy_(self._weights[p].sub_(step))
        self._weights = {}

    def share_buffers(self, rows: Tensor | None = None) -> None:
        """With `every` they are shared when weights are, and not in every step."""
        if not (self.every and self._num_updates):
            super().share_buffers(rows)

    def compare_weights(self) -> None:
        if not (self.every and self._num_updates):  # else they differ
            super().compare_weights()

    def on_validation_start(self) -> None:
        self.exchange_weights()
        super().on_validation_start()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights of a checkpoint: all processes ask for them, before anything else."""
        self.exchange_weights()
        return super().lightning_module_state_dict()

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        if Path(filepath).name == LAST:
            # with `every`, each process has its own optimizer states
            optimizers = [each.state_dict() for each in self.optimizers if self.every]
            own = {replica: [kept, optimizers] for replica, kept in self._states.items()}
            own = move_data_to_device(own, "cpu")
            parts = [own] * self.world_size
            if not (self.is_alone or self.module.trainer.interrupted):
                self.barrier()  # a process that saves for itself is told so
                dist.all_gather_object(parts, own, self.host_group)
            checkpoint[KEY] = {
                "settings": self._settings(),
                "replicas": dict(ChainMap(*parts)),
                "num_bytes": self.num_bytes.tolist(),
            }
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _settings(self) -> dict[str, Any]:
        """A resumed run must not change these. By the name of their flags."""
        names = ("options", "every", "outer_lr", "outer_momentum")
        settings = {f"strategy.{name}": getattr(self, name) for name in names}
        k = {"devices" if self.every else "strategy.replicas": self.num_replicas}
        outer = {"strategy.outer": path_of(self.outer) if self.outer else None}
        return {"strategy.exchange": path_of(self.exchange), **outer, **settings, **k}

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Lightning calls this after `setup`, when a run is resumed."""
        if KEY in checkpoint:
            optimizers = self._restore(checkpoint[KEY])
            states = optimizers or checkpoint["optimizer_states"]
            checkpoint = {**checkpoint, "optimizer_states": states}
        elif self._is_stateful:
            raise MisconfigurationException(
                "This checkpoint has no exchange's state: it is not a run's last.ckpt, or its run "
                "had another strategy."
            )
        super().load_optimizer_state_dict(checkpoint)

    def _restore(self, saved: dict[str, Any]) -> list[Any]:
        for flag, value in self._settings().items():
            if value != (before := saved["settings"].get(flag)):
                raise MisconfigurationException(
                    f"The run has --trainer.{flag}={before}, which must stay: here it is {value}."
                )
        self.num_bytes = np.array(saved["num_bytes"])
        for replica, kept in self._states.items():
            states, optimizers = saved["replicas"][replica]
            kept |= move_data_to_device(states, self.root_device)
        return optimizers
