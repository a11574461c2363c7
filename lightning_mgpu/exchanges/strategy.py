"""`manual_allreduce` with an exchange of one's own in the place of the allreduce."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.optim import LBFGS

from lightning_mgpu.allreduce import textbook_allreduce
from lightning_mgpu.exchanges.check import check_exchange, path_of, plain
from lightning_mgpu.exchanges.exact import exact
from lightning_mgpu.exchanges.local_sgd import outer_step
from lightning_mgpu.exchanges.runner import State, run_exchanges
from lightning_mgpu.strategies import ManualAllreduceStrategy
from lightning_mgpu.strategies.buffers import read_buffers

KEY, LAST = "exchange", "last.ckpt"  # in a checkpoint; the only file with states, which are large
MISSING, FINITE, NOT_FINITE = 0, 1, 2  # what a replica has of a parameter


class ExchangeStrategy(ManualAllreduceStrategy):
    """Replicas that are kept equal by an exchange: a generator that sends what it yields.

    Args:
        exchange: One replica's side (see `lightning_mgpu.exchanges`), or its dotted path.
        options: Arguments of the exchange, by name.
        every: H. Each replica updates itself by its own shard's gradient, and after H updates the
            exchange gets the differences of the weights. Left out: it gets all gradients.
        outer_lr, outer_momentum: Of the step that follows, for `every`.
        replicas, ...: As for `ManualAllreduceStrategy`.
    """

    _num_updates = 0  # since the last exchange of weights

    def __init__(
        self,
        exchange: Callable[..., Any] = exact,
        options: dict[str, Any] | None = None,
        every: int | None = None,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if self.allreduce is not textbook_allreduce or (every is not None and every < 1):
            raise ValueError(f"{every=}: it is 1 or more; and an exchange takes no `allreduce`")
        self.exchange, self.options, self.every = exchange, options or {}, every
        self.outer_lr, self.outer_momentum = outer_lr, outer_momentum
        self._loaded: dict[str, Any] | None = None  # of the checkpoint of a resumed run

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        self._start = partial(self.exchange, **self.options)
        self._trained = self._find_trained()
        k, dtypes = self.num_replicas, {p.dtype for p in self._trained.values()}
        has_state = True in {check_exchange(self._start, k, self.root_device, d) for d in dtypes}
        self._refuse(has_state)
        self._states: dict[tuple[int, str], State] = {}
        weights = self._trained if self.every else {}
        self._weights = {name: p.detach().clone() for name, p in weights.items()}
        self._velocities = {name: torch.zeros_like(p) for name, p in self._weights.items()}
        self._num_updates = 0
        self.num_bytes = np.zeros(2)  # sent by one replica: by this exchange, by the exact sum
        if self._loaded or (self._loaded is not None and (has_state or self.every)):
            self._restore(self._loaded)
        self._loaded = None

    def _find_trained(self) -> dict[str, Tensor]:
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def _refuse(self, has_state: bool) -> None:
        scales = getattr(self.precision_plugin, "scaler", None)
        if (has_state or self.every) and (scales or not self.module.automatic_optimization):
            raise MisconfigurationException(
                "`every`, and an exchange that keeps a state, need automatic optimization and no "
                "GradScaler: bf16-mixed in place of 16-mixed."
            )
        has_lbfgs = any(isinstance(each, LBFGS) for each in self.optimizers)
        if self.every and (self.num_local > 1 or self._layer_sync or has_lbfgs):
            raise MisconfigurationException(
                "`every` needs one replica per process, no sync_batchnorm and no LBFGS."
            )

    @torch.no_grad()
    def exchange_gradients(self, replicas: list[dict[Tensor, Any]]) -> None:
        """Leave what the exchange returns in the `grad` of every parameter."""
        if self.every:  # the mean over this replica's own shard
            sums = {p: torch.empty_like(p).copy_(g) for p, g in replicas[0].items()}
            sums = {p: g.mul_(self.num_replicas) for p, g in sums.items()}
        else:
            named = dict(self.module.named_parameters())
            tensors = [{n: each[p] for n, p in named.items() if p in each} for each in replicas]
            sums = {named[n]: X for n, X in self._exchange_tensors(named, tensors).items()}
        self.set_sums(sums)
        self.num_bytes[1] += sum(p.nbytes for p in sums)

    def _exchange_tensors(
        self, parameters: dict[str, Tensor], replicas: list[dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Returns the results of the exchange, in memory laid out like the parameters."""
        looks = np.array([[look_at(each.get(n)) for n in parameters] for each in replicas])
        most = self._gather(looks).reshape(self.num_replicas, -1).max(axis=0).tolist()
        look_by_name = {n: look for n, look in zip(parameters, most) if look != MISSING}
        generators: list[dict[str, Any]] = []
        for i, tensors in enumerate(replicas):
            generators.append({})
            for name, look in look_by_name.items():
                p, replica = parameters[name], self.global_rank * self.num_local + i
                X = torch.zeros(p.shape, dtype=p.dtype, device=p.device)
                X = X.copy_(tensors[name]) if name in tensors else X
                if look == NOT_FINITE or not p.numel():  # all see it, and no state keeps it
                    generators[i][name] = exact(X, {})
                else:
                    key = replica, f"{name} {tuple(p.shape)} {p.dtype}"
                    state = self._states.setdefault(key, State(name, replica, self.num_replicas))
                    generators[i][name] = self._start(X, state)
        like = {name: parameters[name] for name in look_by_name}
        results, num_bytes = run_exchanges(generators, like, self._gather_rows, self._gather)
        self.num_bytes[0] += num_bytes
        return {name: torch.empty_like(parameters[name]).copy_(X) for name, X in results.items()}

    def _gather_rows(self, rows: Tensor) -> Tensor:
        gathered = rows.repeat(self.world_size, 1)
        if not self.is_alone and rows.numel():
            dist.all_gather([*gathered.chunk(self.world_size)], rows)
        return gathered

    def _gather(self, numbers: np.ndarray) -> np.ndarray:
        return self.gather(numbers).view(numbers.dtype).ravel()

    def _gather_objects(self, value: Any) -> list[Any]:
        values = [plain(value)] * self.world_size
        if not self.is_alone:
            dist.all_gather_object(values, values[0], self._host_group)
        return values

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

    @torch.no_grad()
    def exchange_weights(self) -> None:
        """With `every`: an outer step, if there was an update since the last one."""
        if not self.every or not self._num_updates:
            return
        self._num_updates, trained = 0, self._find_trained()
        lrs = [group["lr"] for each in self.optimizers for group in each.param_groups]
        if len(set(map(str, self._gather_objects([lrs, *trained])))) > 1 or {*trained} != {
            *self._trained
        }:
            raise RuntimeError(
                "`every` needs equal learning rates in all replicas, and the same parameters that "
                "require a gradient from the first step on."
            )
        k, weights = self.num_replicas, self._weights
        differences = {name: (weights[name] - p) / k for name, p in trained.items()}
        for name, mean in self._exchange_tensors(trained, [differences]).items():
            velocity, lr, momentum = self._velocities[name], self.outer_lr, self.outer_momentum
            outer_step(weights[name], velocity, mean, lr, momentum)
            trained[name].copy_(weights[name])
        buffers = read_buffers(self.module)
        super().share_buffers(buffers[None])
        self.num_bytes[0] += len(buffers)

    def share_buffers(self, rows: Tensor) -> None:
        """With `every` they are shared when weights are, and not in every step."""
        if not (self.every and self.module.trainer.training):
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

    def on_train_end(self) -> None:
        self.exchange_weights()
        super().on_train_end()
        if self.is_global_zero:
            sent, by_exact = self.num_bytes / 1e6
            how = path_of(self.exchange).rpartition(".")[2]
            print(f"exchange: {sent:.2f} MB per replica by {how}, {by_exact:.2f} by the exact sum")

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        if Path(filepath).name == LAST:
            states = [[*key, plain(state)] for key, state in self._states.items()]
            optimizers = [each.state_dict() for each in self.optimizers] if self.every else []
            checkpoint[KEY] = {
                "settings": self._settings(),
                "processes": self._gather_objects({"states": states, "optimizers": optimizers}),
                "velocities": plain(self._velocities) if self.outer_momentum else {},
                "num_bytes": self.num_bytes.tolist(),
            }
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _settings(self) -> dict[str, Any]:
        """A resumed run must not change these. By the name of their flags."""
        names = ("options", "every", "outer_lr", "outer_momentum")
        settings = {name: getattr(self, name) for name in names}
        return {KEY: path_of(self.exchange), **settings, "replicas": self.num_replicas}

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(*args, **kwargs)
        if self.module.trainer.state.fn == TrainerFn.FITTING:
            self._loaded = checkpoint.get(KEY, {})
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        if self.every:  # each process has its own
            own = checkpoint[KEY]["processes"][self.global_rank]
            checkpoint = {"optimizer_states": own["optimizers"]}
        super().load_optimizer_state_dict(checkpoint)

    def _restore(self, loaded: dict[str, Any]) -> None:
        if not loaded:
            raise MisconfigurationException(f"Only {LAST} of a run has the exchange's state.")
        for flag, value in self._settings().items():
            if value != (before := loaded["settings"][flag]):
                flag = "devices" if self.every and flag == "replicas" else f"strategy.{flag}"
                raise MisconfigurationException(
                    f"The run has --trainer.{flag}={before}, which must stay: here it is {value}."
                )
        saved = apply_to_collection(loaded, Tensor, lambda X: X.to(self.root_device))
        for replica, key, values in (s for each in saved["processes"] for s in each["states"]):
            state = self._states[replica, key] = State(key.split()[0], replica, self.num_replicas)
            state.update(values)
        self._velocities |= saved["velocities"]
        self.num_bytes = np.array(saved["num_bytes"])


def look_at(X: Tensor | None) -> int:
    return MISSING if X is None else FINITE if X.isfinite().all() else NOT_FINITE
