"""`manual_allreduce` with an exchange of one's own in the place of the allreduce."""

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
    """Replicas that are kept equal by an exchange: a generator that sends what it yields.

    Args:
        exchange: One replica's side (see `lightning_mgpu.exchanges`), or its dotted path.
        options: Arguments of the exchange, by name.
        flat: X has the gradients of all parameters of one dtype that require a gradient, in the
            order of `named_parameters`, as one vector. It is sent after the backward pass.
        replicas, ...: As for `ManualAllreduceStrategy`.
    """

    uses_shared_memory = False
    saves_optimizers = False  # of each process, where they differ
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
            raise ValueError(f"{flat=}: {path_of(exchange)} needs matrices: leave out `flat`")
        if flat and self.bucket_cap_mb:
            raise ValueError(f"{flat=}: gradients are one bucket: leave out `bucket_cap_mb`")
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
        has_lbfgs = any(isinstance(each, LBFGS) for each in self.optimizers)
        is_wrong = has_scaler or has_lbfgs or not self.module.automatic_optimization
        if self._is_stateful and is_wrong:
            raise MisconfigurationException(
                "An exchange that keeps a state, and one of weights, need automatic optimization, "
                "no LBFGS, and no GradScaler: bf16-mixed in place of 16-mixed."
            )
        self._plans: dict[Any, RoundLayout] = {}  # by the keys of states that a bucket has
        self.reset_states()

    def reset_states(self) -> None:
        self._states: dict[Any, Any] = {}
        self._after: dict[Any, Any] = {}  # the states after this update
        self.num_bytes = np.zeros(2)  # sent by one replica: by this exchange, by the exact sum

    def sync_bucket(self, bucket: Bucket, gradients: Gradients) -> MessageSchedule:
        """The exchange of each X, a copy of gradients, with a copy of its state.

        Where numbers are not finite, all exchanges of the bucket here get zeros.
        """
        groups, kept = self._group(bucket, gradients), self._states
        are_finite = torch.stack([X.isfinite().all() for X in bucket.gradients])
        bucket.found_nonfinite = not are_finite.all()
        if self.flat and self._is_stateful and kept and not groups.keys() <= kept.keys():
            rank_zero_warn(
                "flat=True: other parameters than before require a gradient, so the state of "
                "the exchange is reset."
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
        """The parameters of each X, by the key of its state, in which the name comes first."""
        keys = {
            p: (self.sync.layout[p][0], tuple(p.shape), str(p.dtype)) for p in bucket.parameters
        }
        if not self.flat:  # a layer may be replaced by another
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
        if self.flat:  # a state of other parameters has ended
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
        """What comes after an optimizer's step, before bytes are logged."""

    def on_train_end(self) -> None:
        super().on_train_end()
        if self.is_global_zero:
            sent, by_exact = self.num_bytes / 1e6
            how = path_of(self.exchange).rpartition(".")[2]
            print(f"exchange: {sent:.2f} MB per replica by {how}, {by_exact:.2f} by the exact sum")

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        is_interrupted = self.module.trainer.interrupted  # then each process has only its own
        if Path(filepath).name == LAST and not is_interrupted:  # states are large
            optimizers = [each.state_dict() for each in self.optimizers if self.saves_optimizers]
            own = move_data_to_device([self._states, optimizers], "cpu")
            parts = self.control.all_gather_objects(own, "states")
            checkpoint[EXCHANGE] = {
                "settings": self.get_settings(),
                "replicas": dict(enumerate(parts)),
                "num_bytes": self.num_bytes.tolist(),
            }
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def get_settings(self) -> dict[str, Any]:
        """What a resumed run must not change, by the name of its flag."""
        own = {"strategy.exchange": path_of(self.exchange), "strategy.options": self.options}
        return {**own, "strategy.flat": self.flat or None, self.flag_of_k: self.world_size}

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Lightning calls this after `setup`, when a run is resumed, and after a finder's steps."""
        self.reset_states()
        if EXCHANGE in checkpoint:
            optimizers = self._restore(checkpoint[EXCHANGE])
            states = optimizers or checkpoint["optimizer_states"]
            checkpoint = {**checkpoint, "optimizer_states": states}
        elif self._is_stateful and checkpoint["global_step"]:  # a finder's has no state yet
            raise MisconfigurationException(
                "This checkpoint has no exchange's state: it is not a run's last.ckpt, or its run "
                "had another strategy."
            )
        super().load_optimizer_state_dict(checkpoint)

    def _restore(self, saved: dict[str, Any]) -> list[Any]:
        before, own = saved["settings"], self.get_settings()
        for flag in before | own:
            if before.get(flag) != own.get(flag):
                raise MisconfigurationException(
                    f"The run has --trainer.{flag}={before.get(flag)}, which must stay: here it is "
                    f"{own.get(flag)}."
                )
        self.num_bytes = np.array(saved["num_bytes"])
        states, optimizers = saved["replicas"][self.global_rank]
        self._states = move_data_to_device(states, self.root_device)
        return optimizers
