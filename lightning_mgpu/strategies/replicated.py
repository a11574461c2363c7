"""Replicas that live as long as the Trainer runs: made once, and kept like the original, which others see and edit."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import nn
from typing_extensions import override

from lightning_mgpu.strategies.auto_split import AutoSplit
from lightning_mgpu.strategies.batch.shards import shard_sizes
from lightning_mgpu.strategies.editing import UsersHooks, may_edit_between
from lightning_mgpu.strategies.layers.embeddings import synchronize_embedding
from lightning_mgpu.strategies.layers.own_forward import give_back
from lightning_mgpu.strategies.layers.sync_batchnorm import synchronize_batch_norm
from lightning_mgpu.strategies.optimizers.per_replica import PerReplica
from lightning_mgpu.strategies.recording.recording import Recorder, record_replicas
from lightning_mgpu.strategies.replicas.replicas import Replicas
from lightning_mgpu.strategies.single_process import SingleProcessStrategy


class ReplicatedStrategy(PerReplica, SingleProcessStrategy):
    """Holds k replicas of the module with parameters of their own.

    The original's weights and BatchNorm statistics are given to the replicas wherever somebody else may have changed
    them, and the replicas' BatchNorm statistics to the original wherever somebody else looks at them.

    Args:
        parallel_devices: See `SingleProcessStrategy`.
        split: Relative shares of the batch, one a device, or `auto`.
    """

    def __init__(
        self,
        parallel_devices: Sequence[str] | None = None,
        split: Sequence[float] | Literal["auto"] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(parallel_devices, None if split == "auto" else split, **kwargs)
        self._auto_split = AutoSplit() if split == "auto" else None
        self._is_stale = False  # somebody may have edited the original's parameters
        self._is_evaluated = False  # or all there is, BatchNorm's statistics too
        self.hooks = UsersHooks()

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        self._make_replicas()
        return model

    def _make_replicas(self) -> None:
        self._replicas = Replicas(self.original, self.devices)
        self._recorders = record_replicas(self._replicas.modules)
        self._syncs_batch_norm = self._layer_sync is not None and len(self.devices) > 1
        if self._syncs_batch_norm:
            for layers in self._replicas.batch_norms:
                synchronize_batch_norm(layers, self.team)
        if len(self.devices) > 1:
            for layers in self._replicas.embeddings:
                if layers[0].max_norm is not None:
                    synchronize_embedding(layers, self.team)

    def renew_replicas(self) -> None:
        """The original's structure has changed: somebody has pruned, replaced or added layers."""
        self._combine_batch_norms()
        self._remove_forwards()
        self._make_replicas()

    @property
    @override
    def is_split(self) -> bool:
        return len(self.devices) > 1 and hasattr(self, "_replicas")  # not after teardown

    @property
    @override
    def needs_turns(self) -> bool:
        return self._replicas.share_iterators()

    @override
    def replicas(self) -> Sequence[LightningModule]:
        return self._replicas.modules

    @override
    def recorders(self) -> Sequence[Recorder]:
        return self._recorders

    def _combine_batch_norms(self) -> None:
        if self.is_split:
            self._replicas.combine_batch_norms(self._syncs_batch_norm)

    def synchronize(self) -> None:
        """Combine BatchNorm's running statistics, and make all replicas equal to the original before the next step."""
        self._combine_batch_norms()
        self._is_evaluated = True

    @override
    def on_validation_start(self) -> None:
        self.synchronize()

    on_test_start = on_predict_start = on_train_end = on_validation_end = on_validation_start

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._combine_batch_norms()
        self._is_stale = True  # `on_save_checkpoint` may edit
        return super().lightning_module_state_dict()

    @override
    def evaluate(self, name: str, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_split and self._replicas.has_new_structure():
            self.renew_replicas()
        return super().evaluate(name, batch, *args, **kwargs)

    @override
    def run_step(self, name: str, batch: Any, *args: Any, **kwargs: Any) -> tuple[list[int], list[int], list[Any]]:
        self._seen_by.clear()
        if self._replicas.refresh():
            self._draws.clear()
            self.synchronize()
        self._replicas.give_tensors(uncounted=self._is_evaluated)
        if self._is_evaluated or self._is_stale or self.hooks.edit or self._replicas.is_edited():
            self._replicas.broadcast(norms=self._is_evaluated or self._syncs_batch_norm)
            self._is_stale = self._is_evaluated = False
        active, sizes, outputs = super().run_step(name, batch, *args, **kwargs)
        self._replicas.collect(active)
        are_watched = torch.is_inference_mode_enabled() and may_edit_between(self.original)
        self._replicas.mark_step(dict(zip(active, sizes)), name == "training_step", are_watched)
        return active, sizes, outputs

    @override
    def _sizes(self, batch: Any) -> list[int]:
        """The original never goes without: it takes a sample from another if it has to.

        BatchNorm cannot normalise a sample by itself: devices that would get a single one go without.
        """
        sizes = _none_without_first(super()._sizes(batch))
        total, num_active = sum(sizes), len(sizes)
        while 1 in sizes and total > 1 and num_active > 1 and self._normalizes_shards():
            num_active -= 1
            fewer = shard_sizes(total, self.shares[:num_active]) + [0] * (len(sizes) - num_active)
            sizes = _none_without_first(fewer)
        return sizes

    def _normalizes_shards(self) -> bool:
        if self._syncs_batch_norm:
            return False
        return any(layer.training for layer, *_ in self._replicas.batch_norms)

    @override
    def _run(self, name: str, function: Callable[[int], Any], active: list[int]) -> list[Any]:
        if self._auto_split is None or name not in ("training_step", "backward"):
            return super()._run(name, function, active)
        results = super()._run(name, self._auto_split.timed(function, self.devices), active)
        if name == "training_step" and (shares := self._auto_split.next_shares(self.shares)):
            self.split = shares
        return results

    @override
    def teardown(self) -> None:
        self._recorders = []
        if hasattr(self, "_replicas"):
            self._combine_batch_norms()  # after an exception or Ctrl-C nobody has
            self._remove_forwards()
            del self._replicas
        super().teardown()

    def _remove_forwards(self) -> None:
        give_back(layers[0] for layers in (*self._replicas.batch_norms, *self._replicas.embeddings))


def _none_without_first(sizes: list[int]) -> list[int]:
    """Sizes of which the first is not 0, if any is not."""
    if sizes[0] == 0 and any(sizes):
        sizes[sizes.index(max(sizes))] -= 1
        sizes[0] = 1
    return sizes
