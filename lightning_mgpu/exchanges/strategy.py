"""`manual_allreduce` with an exchange instead of an allreduce."""

from collections import defaultdict
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import LBFGS

from lightning_mgpu.allreduce import textbook_allreduce
from lightning_mgpu.distributed.comm.buckets import Bucket, Gradients
from lightning_mgpu.distributed.comm.schedules import MessageSchedule
from lightning_mgpu.exchanges.check import SHAPES, check_exchange, path_of
from lightning_mgpu.exchanges.route import RoundLayout, State, exact, run_exchanges
from lightning_mgpu.strategies import ManualAllreduceStrategy
from lightning_mgpu.strategies.manual_allreduce import name_of
from lightning_mgpu.tools import EXCHANGE, LAST


class ExchangeStrategy(ManualAllreduceStrategy):
    """Data parallelism with a communication hook: a generator that sends what it yields.

    Args:
        exchange: Generator function (see `lightning_mgpu.exchanges`), or its dotted path.
        options: Keyword arguments of the exchange.
        flat: Concatenate the gradients of all trainable parameters of one dtype, in the order of
            `named_parameters`, to one vector X. It is sent after the backward pass.
        replicas, ...: As for `ManualAllreduceStrategy`.
    """

    uses_shared_memory = False
    saves_optimizers = False  # per process, if they differ
    flag_of_k = "strategy.replicas"
    why_weights_differ = (
        "an exchange whose result depends on the replica or draws unseeded numbers, "
        f"{ManualAllreduceStrategy.why_weights_differ}"
    )

    def __init__(
        self,
        exchange: Callable[..., Any] = exact,
        options: dict[str, Any] | None = None,
        flat: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if self.allreduce is not textbook_allreduce or self.as_written:
            raise ValueError("an exchange replaces the allreduce: omit `allreduce`, `as_written`")
        if flat and hasattr(getattr(exchange, "func", exchange), "needs_matrices"):
            raise ValueError(f"{flat=}: {path_of(exchange)} needs matrices: omit `flat`")
        if flat and self.bucket_cap_mb:
            raise ValueError(f"{flat=}: gradients are one bucket: omit `bucket_cap_mb`")
        self.bucket_cap_mb = 0 if flat else self.bucket_cap_mb
        self.exchange, self.options, self.flat = exchange, options or {}, flat

    def make_function(self) -> Callable[..., Any]:
        """The exchange with its options."""
        return partial(self.exchange, **self.options)

    @property
    def description(self) -> str:
        return name_of(self.exchange)

    def name_function(self) -> str:
        return path_of(self.exchange)

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.module.trainer.state.fn != TrainerFn.FITTING:
            return
        self._function = self.make_function()
        with self.precision_plugin.module_init_context():
            dtype = torch.get_default_dtype()
        # before a callback makes a run directory
        shapes = [(1000,)] if self.flat else SHAPES
        args = self._function, self.name_function(), self.root_device, dtype, shapes
        has_state = check_exchange(*args)
        self._is_stateful = has_state or self.saves_optimizers

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        has_scaler = getattr(self.precision_plugin, "scaler", None) is not None
        has_lbfgs = any(isinstance(optimizer, LBFGS) for optimizer in self.optimizers)
        is_wrong = has_scaler or has_lbfgs or not self.module.automatic_optimization
        if self._is_stateful and is_wrong:
            raise MisconfigurationException(
                "Exchanges with state, local SGD and DiLoCo support neither manual optimization, "
                "nor LBFGS, nor a GradScaler: use bf16-mixed instead of 16-mixed."
            )
        self._plans: dict[Any, RoundLayout] = {}  # by state keys of a bucket
        self.reset_states()

    def reset_states(self) -> None:
        self._states: dict[Any, Any] = {}
        self._after: dict[Any, Any] = {}  # the states after this update
        self.num_bytes = np.zeros(2)  # sent by one replica: by this exchange, by the exact sum

    def sync_bucket(self, bucket: Bucket, gradients: Gradients) -> MessageSchedule:
        """Run the exchange of each X, a copy of gradients, with a copy of its state.

        If a gradient is non-finite, all local exchanges of the bucket receive zeros.
        """
        groups, kept = self._group(bucket, gradients), self._states
        are_finite = torch.stack([X.isfinite().all() for X in bucket.gradients])
        bucket.found_nonfinite = not are_finite.all()
        if self.flat and self._is_stateful and kept and not groups.keys() <= kept.keys():
            rank_zero_warn(
                "flat=True: the set of parameters that require a gradient has changed, so the "
                "state of the exchange is reset."
            )
        rows, copies, states = dict(zip(bucket.parameters, bucket.gradients)), {}, {}
        for key, group in groups.items():
            X = torch.cat([rows[p].flatten() for p in group])
            X = X.zero_() if bucket.found_nonfinite else X
            data = self._after[key] = deepcopy(kept.get(key, {}))
            name = key[0]
            states[name] = State(name, self.global_rank, self.world_size, data, self._seed)
            copies[name] = X if self.flat else X.view_as(group[0])
        plan = self._plans.setdefault((*groups,), RoundLayout(self.control))
        route = run_exchanges(self._function, [copies], [states], self.world_size, plan)
        return self._split_results(bucket, [*groups.values()], route)

    def _group(self, bucket: Bucket, gradients: Gradients) -> dict[Any, list[Tensor]]:
        """The parameters of each X, by the key of its state: (name, ...)."""
        keys = {
            p: (self.sync.layout[p][0], tuple(p.shape), str(p.dtype)) for p in bucket.parameters
        }
        if not self.flat:  # keys contain shapes, as a layer may be replaced
            return {key: [p] for p, key in keys.items()}
        groups = defaultdict[Any, list[Tensor]](list)
        for p in self.sync.layout:
            if p.dtype == bucket.dtype and (p.requires_grad or p in gradients):
                groups[str(p.dtype)].append(p)
        return {(dtype, *(keys[p] for p in group)): group for dtype, group in groups.items()}

    def _split_results(self, bucket: Bucket, groups: list[list[Tensor]], route: Any) -> Any:
        results, num_bytes = yield from route
        self.num_bytes[0] += num_bytes
        found: Gradients = {}
        for group, X in zip(groups, results):
            parts = X.flatten().split([p.numel() for p in group])
            found |= {p: part.view(p.shape) for p, part in zip(group, parts)}
        found |= {p: torch.zeros_like(p) for p in bucket.parameters if p not in found}
        return bucket.write_results([found[p] for p in bucket.parameters])

    def sum_over_replicas(self, *args: Any, **kwargs: Any) -> Gradients:
        return self.commit_states(super().sum_over_replicas(*args, **kwargs))

    def commit_states(self, results: Gradients) -> Gradients:
        """Keep the states of this update. If a gradient was non-finite, all results are NaN."""
        after, self._after = self._after, {}
        if self.sync.found_nonfinite:
            return {p: X.fill_(torch.nan) for p, X in results.items()}
        if self.flat:  # drop states of a different set of parameters
            self._states.clear()
        names = {self.sync.layout[p][0] for p in results if p in self.sync.layout}
        self._states |= {k: data for k, data in after.items() if self.flat or k[0] in names}
        for p, X in results.items():
            if not X.isfinite().all():
                raise RuntimeError(
                    f"{self.sync.layout[p][0]}: an exchange produced non-finite values from finite "
                    "gradients"
                )
        return results

    def set_sums(self, sums: Gradients) -> None:
        super().set_sums(sums)
        self.num_bytes[1] += sum(p.nbytes for p in sums)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(*args, **kwargs)
        self.end_update()
        if (trainer := self.module.trainer).is_last_batch:
            values = dict(zip(("exchange_mb", "exact_mb"), (self.num_bytes / 1e6).tolist()))
            for logger in trainer.loggers:
                logger.log_metrics({**values, "epoch": trainer.current_epoch}, trainer.global_step)
        return output

    def end_update(self) -> None:
        """Called after each optimizer step, before bytes are logged."""

    def on_train_end(self) -> None:
        super().on_train_end()
        if self.is_global_zero:
            sent, by_exact = self.num_bytes / 1e6
            how = path_of(self.exchange).rpartition(".")[2]
            print(f"exchange: {sent:.2f} MB per replica by {how}, {by_exact:.2f} by the exact sum")

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        is_interrupted = self.module.trainer.interrupted  # then each process has only its own
        if Path(filepath).name == LAST and not is_interrupted:  # states are large
            optimizers = [o.state_dict() for o in self.optimizers if self.saves_optimizers]
            own = move_data_to_device([self._states, optimizers], "cpu")
            parts = self.control.all_gather_objects(own, "states")
            checkpoint[EXCHANGE] = {
                "settings": self.get_settings(),
                "replicas": dict(enumerate(parts)),
                "num_bytes": self.num_bytes.tolist(),
            }
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def get_settings(self) -> dict[str, Any]:
        """Settings that must not change when a run is resumed, by flag."""
        own = {"strategy.exchange": path_of(self.exchange), "strategy.options": self.options}
        return {**own, "strategy.flat": self.flat or None, self.flag_of_k: self.world_size}

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Called by Lightning after `setup`, when a run is resumed, and after a finder's steps."""
        self.reset_states()
        if EXCHANGE in checkpoint:
            optimizers = self._restore(checkpoint[EXCHANGE])
            states = optimizers or checkpoint["optimizer_states"]
            checkpoint = {**checkpoint, "optimizer_states": states}
        elif self._is_stateful and checkpoint["global_step"]:  # a finder's has no state yet
            raise MisconfigurationException(
                "This checkpoint does not contain the state of an exchange: use the last.ckpt of a "
                "run with the same strategy."
            )
        super().load_optimizer_state_dict(checkpoint)

    def _restore(self, saved: dict[str, Any]) -> list[Any]:
        before, own = saved["settings"], self.get_settings()
        for flag in before | own:
            if before.get(flag) != own.get(flag):
                raise MisconfigurationException(
                    f"--trainer.{flag}={own.get(flag)}: cannot change when resuming; use the run's "
                    f"value, {before.get(flag)}."
                )
        self.num_bytes = np.array(saved["num_bytes"])
        states, optimizers = saved["replicas"][self.global_rank]
        self._states = move_data_to_device(states, self.root_device)
        return optimizers
