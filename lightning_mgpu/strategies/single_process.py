"""What strategies that drive several devices from one process share: devices, ranks, and a step split over replicas."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import BatchSampler, DataLoader, default_convert
from typing_extensions import override

from lightning_mgpu.strategies.batch.gather import bring_home, gather
from lightning_mgpu.strategies.batch.nesting import leaves
from lightning_mgpu.strategies.batch.shards import find_batch_size, may_be_one_sample, shard_sizes, split_batch
from lightning_mgpu.strategies.editing import is_own, may_edit_batches
from lightning_mgpu.strategies.one_rank import OneRank
from lightning_mgpu.strategies.optimizers.per_replica import profiled_once
from lightning_mgpu.strategies.recording.log_calls import intercepted
from lightning_mgpu.strategies.recording.recording import Recorder
from lightning_mgpu.strategies.recording.replay import replay
from lightning_mgpu.strategies.replicas.values import PLAIN, version_of
from lightning_mgpu.strategies.threads.device_module import device_module
from lightning_mgpu.strategies.threads.generators import (
    Streams,
    are_equal,
    generator_states,
    new_generator_states,
    set_generator_states,
    watch_forks,
)
from lightning_mgpu.strategies.threads.team import Team

Versions = list[tuple[Any, int]]

DEVICE_HOOKS = ("transfer_batch_to_device", "on_after_batch_transfer")


class SingleProcessStrategy(OneRank):
    """Runs each step of a LightningModule on several devices of this process, a shard of the batch on each.

    Subclasses implement `replicas()`, the modules to run, one a device, of which the first is the user's own, and
    `recorders()`, which write down what they log.

    Args:
        parallel_devices: The devices, `["cuda:0", "cpu"]` say; one may stand there several times. Left out: those of
            `Trainer(accelerator, devices)`.
        split: Relative shares of the batch, one a device; left out: even ones.
    """

    def __init__(
        self, parallel_devices: Sequence[str] | None = None, split: Sequence[float] | None = None, **kwargs: Any
    ) -> None:
        devices = [_device(name) for name in parallel_devices] if parallel_devices else None
        super().__init__(parallel_devices=devices, **kwargs)
        if isinstance(split, str):
            raise MisconfigurationException(
                f"split={split!r}: give one share for each device, [0.9, 0.1] say, or 'auto'."
            )
        self.split = list(split) if split is not None else None
        self._blocked = False  # inside an accumulation window
        self._has_unbatched = False  # whether a loader of the run makes no batches
        self._sent: tuple[Any, list[int], list[Any], Versions] | None = None  # a batch, its shards, what it was made of
        self._streams: Streams = []
        self._draws: dict[str, bool] = {}  # whether a step of this name draws random numbers

    @property
    @override
    def root_device(self) -> torch.device:
        """The first; in a step, that of the replica which asks."""
        return self.devices[self.team.index] if hasattr(self, "team") else self.devices[0]

    @property
    def devices(self) -> list[torch.device]:
        return self.parallel_devices or [torch.device("cpu")]

    @property
    def shares(self) -> list[float]:
        """Each device's share of the batch; they add up to the number of devices."""
        split = self.split or [1.0] * len(self.devices)
        return [share * len(split) / sum(split) for share in split]

    @override
    def setup_environment(self) -> None:
        if self.split is not None and not (
            len(self.split) == len(self.devices) and all(0 < share < float("inf") for share in self.split)
        ):
            raise MisconfigurationException(
                f"split={self.split} needs one positive share for each of the {len(self.devices)} devices."
            )
        super().setup_environment()

    @override
    def setup(self, trainer: Trainer) -> None:
        self.team = Team(self.devices)
        self._draws = {}
        # Replica 0 draws from the global generators, as one device would; the others have streams of their own
        self._streams = [generator_states(self.root_device)]
        self._streams += [
            new_generator_states(device, torch.initial_seed() + i) for i, device in enumerate(self.devices[1:], start=1)
        ]
        super().setup(trainer)

    def random_state(self) -> dict[str, Any]:
        """What a resumed run needs to draw the same numbers, beside the global generators."""
        return {"streams": self._streams[1:], "draws": dict(self._draws)}

    def set_random_state(self, state: dict[str, Any]) -> None:
        if len(state["streams"]) == len(self._streams) - 1:  # else on another number of devices
            self._streams[1:], self._draws = state["streams"], dict(state["draws"])

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    @property
    def needs_turns(self) -> bool:
        """Whether replicas use what only one may at a time."""
        return False

    @property
    def is_split(self) -> bool:
        """Whether there are replicas to split a step over."""
        return len(self.devices) > 1

    def replicas(self) -> Sequence[LightningModule]:
        raise NotImplementedError

    def recorders(self) -> Sequence[Recorder]:
        raise NotImplementedError

    # A step: split the batch, run the replicas, put the results together

    @override
    def process_dataloader(self, dataloader: Any) -> Any:
        # torch's `collate_fn` for `batch_size=None`, with a sampler that may be one of batches
        if isinstance(dataloader, DataLoader) and dataloader.collate_fn is default_convert:
            self._has_unbatched |= not isinstance(dataloader.sampler, BatchSampler)
        return super().process_dataloader(dataloader)

    def find_batch_size(self, batch: Any) -> int | None:
        """The number of samples in a batch; `None` if it cannot be split (see `batch/shards.py`)."""
        return None if self._has_unbatched and may_be_one_sample(batch) else find_batch_size(batch)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """The whole batch on the first device, for hooks and callbacks, and a shard on every other one.

        Shards go from host memory straight to their device. Where the user's own transfer hooks change the batch, they
        do it once, to the whole batch on the first device, and shards are cut from the result.
        """
        whole = super().batch_to_device(batch, device, dataloader_idx)
        assert self.lightning_module is not None
        sources = (self.lightning_module, getattr(self.lightning_module._trainer, "datamodule", None))
        has_hooks = any(is_own(hook, source) for hook in DEVICE_HOOKS for source in sources if source is not None)
        self._sent = None
        if len(self.devices) > 1 and self.find_batch_size(whole) is None:
            if any(not isinstance(leaf, PLAIN) and getattr(leaf, "ndim", 1) for leaf in leaves(whole)):
                rank_zero_warn(
                    "A batch whose parts differ in length along dimension 0, that nobody knows how to cut, or that may "
                    f"be a single sample, is not split: {self.devices[0]} computes it alone."
                )
        elif len(self.devices) > 1 and not has_hooks:
            sizes = self._sizes(whole)
            shards = split_batch(batch, sizes)
            shards[0] = split_batch(whole, sizes)[0]  # is there already
            self._sent = whole, sizes, self._send(shards), _versions(whole)
        return whole

    def run_step(self, name: str, batch: Any, *args: Any, **kwargs: Any) -> tuple[list[int], list[int], list[Any]]:
        """Run `name`, training_step say, on every replica that gets samples.

        Returns:
            The replicas that ran, the sizes of their shards, and what they returned.
        """
        sizes = self._sizes(batch)
        active = [i for i, size in enumerate(sizes) if size > 0]
        modules, recorders = self.replicas(), self.recorders()
        sent, self._sent = self._sent, None
        if active == [0]:  # it has the whole batch, and nothing has to be put together
            with recorders[0].alone(sizes[0]):
                outputs = self._run(name, lambda _: getattr(modules[0], name)(batch, *args, **kwargs), active)
            return active, sizes[:1], outputs
        is_same = sent is not None and sent[0] is batch and sent[1] == sizes and _is_same(sent[3], _versions(batch))
        if is_same and not (torch.is_inference_mode_enabled() and may_edit_batches(modules[0])):  # without a trace
            shards = sent[2]  # type: ignore[index]
        else:  # a hook has changed it since
            shards = split_batch(batch, sizes)  # what the user keeps on the CPU stays there
            shards = [bring_home(shard, device, self.devices[0]) for shard, device in zip(shards, self.devices)]

        def step(i: int) -> Any:
            with recorders[i].recording():
                return getattr(modules[i], name)(shards[i], *args, **kwargs)

        profiler = modules[0].trainer.profiler  # type: ignore[attr-defined]
        with profiled_once(profiler, self.team), intercepted(modules):
            outputs = self._run(name, step, active)
        sizes = [sizes[i] for i in active]
        replay(recorders[0], [recorders[i].take() for i in active], sizes)
        return active, sizes, outputs

    def evaluate(self, name: str, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """An evaluation step on all devices; outputs in the order of the batch."""
        if not self.is_split or self.find_batch_size(batch) is None:
            return getattr(self.lightning_module, name)(batch, *args, **kwargs)
        _, sizes, outputs = self.run_step(name, batch, *args, **kwargs)
        return gather(outputs, sizes, self.root_device)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self.evaluate("validation_step", *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self.evaluate("test_step", *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.predict_step_context():
            return self.evaluate("predict_step", *args, **kwargs)

    def _run(self, name: str, function: Any, active: list[int]) -> list[Any]:
        """Run replicas side by side, or in turns: where they need to, or draw random numbers from what they share.

        The first step of every name runs in turns to see whether it draws any.
        """
        if len(active) == 1:
            return self.team.run(function, active)
        before = generator_states(self.root_device)
        draws = (self.needs_turns and name != "backward") or self._draws.get(name)
        watched = watch_forks() if not draws and name != "backward" else contextlib.nullcontext()
        if draws is False:
            with watched as forks:
                outputs = self.team.run(function, active)
            self._draws[name] = bool(forks) or not are_equal(before, generator_states(self.root_device))
            return outputs
        self._streams[0] = before
        streams = list(self._streams)
        with watched as forks:
            outputs = self.team.run(function, active, turns=streams, all_cores=draws is not None)
        set_generator_states(self.root_device, streams[0])
        self._draws[name] = draws or bool(forks) or not all(map(are_equal, self._streams, streams))
        self._streams = streams
        return outputs

    def _send(self, shards: list[Any]) -> list[Any]:
        return [move_data_to_device(shard, device) for shard, device in zip(shards, self.devices)]

    def _sizes(self, batch: Any) -> list[int]:
        """Samples for each device; what cannot be split is one sample, for the first."""
        batch_size = self.find_batch_size(batch)
        if batch_size is None:
            return [1] + [0] * (len(self.devices) - 1)
        return shard_sizes(batch_size, self.shares)

    @contextlib.contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:  # type: ignore[override]
        """Around the batches of an accumulation window but its last, after which gradients are reduced once."""
        self._blocked = True
        try:
            yield
        finally:
            self._blocked = False

    @override
    def teardown(self) -> None:
        if hasattr(self, "team"):
            self.team.close()
            del self.team  # a Trainer can be copied again
        self._sent = None
        self._has_unbatched = False
        super().teardown()


def _versions(batch: Any) -> Versions:
    """What a batch is made of, and how often each tensor of it was changed in place."""
    return [(leaf, version_of(leaf)) for leaf in leaves(batch)]


def _is_same(now: Versions, then: Versions) -> bool:
    return len(now) == len(then) and all(a[0] is b[0] and a[1] == b[1] for a, b in zip(now, then))


def _device(name: str | torch.device) -> torch.device:
    """A device by name; torch's own errors come late, or are long."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise MisconfigurationException(f"parallel_devices: {name!r} is no device; 'cpu', 'cuda:0', ... are.") from None
    module = device_module(device)
    if module is None:
        return device
    if (device.index or 0) >= (count := module.device_count()):
        raise MisconfigurationException(
            f"parallel_devices: there is no {name!r} here; torch sees {count} {device.type.upper()} device(s)."
        )
    return torch.device(device.type, device.index or 0)
