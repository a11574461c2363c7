"""A step of the module on k replicas, each with its shard of the batch, becomes one step.

Replicas take turns in the caller's thread. GPUs work side by side all the same, as no call waits
for a GPU. Where replicas must wait for each other in the middle of a step (manual optimization,
synchronised BatchNorm, `lockstep=True`), `lockstep.py` runs them.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mgpu.strategies.auto_split import AutoSplit
from lightning_mgpu.strategies.collectives import Collectives
from lightning_mgpu.strategies.combining import average_statistics, gather
from lightning_mgpu.strategies.devices_and_attributes import (
    autocast_like,
    find_device,
    gpus_first,
    on_read,
)
from lightning_mgpu.strategies.edits import Edits
from lightning_mgpu.strategies.gradients import Gradients
from lightning_mgpu.strategies.hooks import unknown_code
from lightning_mgpu.strategies.layers import check_layers
from lightning_mgpu.strategies.lockstep import Lockstep
from lightning_mgpu.strategies.loss_weight import Window
from lightning_mgpu.strategies.manual_optimization import Meetings
from lightning_mgpu.strategies.records import Record, Recorder
from lightning_mgpu.strategies.reducing import Reducer
from lightning_mgpu.strategies.replicas import Replicas
from lightning_mgpu.strategies.same_program import digest_step, share_records
from lightning_mgpu.strategies.split_batch import cut_graph, send, share_out, split_batch
from lightning_mgpu.strategies.sync_batchnorm import synchronized_batch_norm
from lightning_mgpu.strategies.updates import Updates, refuse_other_optimizers

CHECK_EVERY = 50  # updates, between comparisons of replicas that make their own
STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class RunStepStrategy(Collectives, ParallelStrategy):
    """Runs a step on all replicas and puts the results together. `setup` makes its parts."""

    weighs_losses = True  # by the weights that `training_step` returns
    is_split = False  # whether there are replicas to split a step over; else Lightning does it all
    _is_first_step = True  # since weights may have been edited
    _batch_idx = -1  # a step need not have it as an argument
    own_updates = False  # whether every replica has made the last update itself
    sums_everywhere: bool  # whether `reduce_gradients` leaves the sum in all, or the first

    def __init__(
        self,
        parallel_devices: list[str] | None = None,
        split: list[float] | Literal["auto"] | None = None,
        replicas: int | None = None,
        lockstep: bool = False,
        **kwargs: Any,
    ) -> None:
        devices = [find_device(name) for name in parallel_devices] if parallel_devices else None
        super().__init__(parallel_devices=devices, **kwargs)
        self.split, self.num_replicas, self.is_locked = split, replicas, lockstep
        self.sizes: dict[int, int] = {}  # the samples of the replicas that have some in this step
        self.loader_batch_sizes: set[int] = set()
        self.batch_graph: list[tuple[Tensor, Tensor]] = []  # see `cut_graph`
        self._is_set_up = False

    # Devices

    @property
    @override
    def root_device(self) -> torch.device:
        """The first; in a step, that of the replica which asks."""
        if self._is_set_up:
            return self.replicas.devices[self.replicas.current]
        return self._own_devices[0]

    @override
    def setup_environment(self) -> None:
        self.check_launch()
        super().setup_environment()
        self.join_processes(self.root_device)

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.lightning_module is not None
        devices = self.devices
        self.shares = self.split if isinstance(self.split, list) else [1.0] * len(devices)
        self.auto_split = AutoSplit(self.split == "auto")
        here, num_processes = self.devices_here, self.num_all_processes
        all_seeded = self.num_replicas is not None or num_processes > 1
        first = self.process_rank * len(here)
        self.replicas = Replicas(self.lightning_module, here, all_seeded, first)
        how_to_reduce = self.reduce_gradients, self.sums_everywhere, self.reduces_all
        reducer = Reducer(self.replicas, self.processes, *how_to_reduce)
        self.lockstep = Lockstep(devices, self.turn, self.processes)
        self.gradients = Gradients(self.replicas, self.lockstep, reducer)
        self.edits = Edits(self.replicas)
        self.updates = Updates(self.replicas, replicas_update=self.sums_everywhere)
        self.recorder = Recorder(self.replicas, self.lockstep)
        self.window = Window(self.replicas.module)
        self._is_set_up = self._is_first_step = True
        self.is_split = len(devices) > 1
        if self.is_split:
            check_layers(self.replicas.module, sync_batchnorm=self._layer_sync is not None)
        super().setup(trainer)

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    @override
    def teardown(self) -> None:
        if self._is_set_up:
            self.replicas.release()
        if self.processes.num > 1:
            self.processes.known = ()  # these live as long as the script
        self._is_set_up = self.is_split = False
        for name in ("replicas", "edits", "gradients", "updates", "lockstep", "recorder"):
            vars(self).pop(name, None)
        super().teardown()

    # What subclasses differ in

    @property
    def reduces_all(self) -> bool:
        """Whether every process reduces the gradients of all parameters, not of its part."""
        return False

    def reduce_gradients(self, gradients: dict[str, list[Tensor]]) -> None:
        """For every parameter, by its name: leave the sum of k gradients in all, or the first."""
        raise NotImplementedError

    def update_replicas(self, optimizer: Optimizer) -> None:
        """Update the other replicas, after the first one was updated."""
        raise NotImplementedError

    @override
    def process_dataloader(self, dataloader: object) -> object:
        size = getattr(getattr(dataloader, "batch_sampler", None), "batch_size", None)
        self.loader_batch_sizes |= {size} if isinstance(size, int) else set()
        # private: before Lightning does it by the process's rank, as workers draw the same in all
        _auto_add_worker_init_fn(dataloader, rank=0)
        return dataloader

    # A step

    def _run(self, name: str, batch: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """Run a step on every replica that gets samples, and return what they return."""
        self._batch_idx += name != STEPS[0]  # `on_train_batch_start` knows a training batch's
        numbers = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, int)]
        numbers = numbers or [self._batch_idx]  # of the batch, and its loader
        shards = self._split(batch)
        records = {i: Record(self.sizes[i]) for i in shards}
        self._prepare(name)
        with self.recorder.recording(records) if self._are_several else nullcontext():
            self._begin(name, *numbers)  # after attributes were put on the module
            digests = {}
            if self.processes.num > 1:
                self.processes.known = self._known_objects()
                is_check_due = self.is_check_due if self._trains else numbers[0] == 0
                digests = digest_step(batch, self.replicas, is_check_due)

            def step(i: int) -> Any:
                with autocast_like(self.lockstep.devices[0], self.lockstep.devices[i]):
                    return getattr(self.replicas.module, name)(shards.pop(i), *args, **kwargs)

            self._run_replicas(step, records)
            where = f"{name} at step {self.replicas.module.global_step}"
            records = share_records(self.processes, where, records, digests)
            self._combine(records)
        return [record.output for record in records.values()]

    def _gather(self, name: str, outputs: list[Any]) -> Any:
        sizes, notes = list(self.sizes.values()), self.replicas.notes
        return gather(outputs, sizes, self.replicas.devices[0], notes, f"the output of {name}")

    def _known_objects(self) -> list[Any]:
        """Objects of which every process has its own, in the same order."""
        module, layers = self.replicas.module, [layer for _, layer in self.replicas.modules()]
        trainer: Any = module.trainer
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        known = [*module.modules(), *layers, *self.recorder.metrics, self, trainer]
        known += [*self.optimizers, *self._lightning_optimizers, *schedulers]
        return [*known, *trainer.callbacks, *trainer.loggers]

    def _split(self, batch: Any) -> dict[int, Any]:
        """The shards of the replicas that get samples, on their devices."""
        home = self.lockstep.devices[0]
        all_sizes = share_out(batch, self.shares, home, self.loader_batch_sizes)
        self.sizes = {i: size for i, size in enumerate(all_sizes) if size}
        self._are_several = len(self.sizes) > 1 or self.processes.num > 1
        self.batch_graph = []
        if len(self.sizes) == 1:
            shards = [batch]
        else:
            batch, self.batch_graph = cut_graph(batch)
            shards = split_batch(batch, all_sizes)
        if self.batch_graph and self.processes.num > 1:
            raise RuntimeError(
                "A batch that a hook has computed with weights, and its gradients, needs all "
                "replicas in one process: compute it in the step."
            )
        # before the first replica runs: a copy from a GPU waits for its earlier work
        here = [i for i in self.sizes if i in self.replicas.numbers]
        return {i: send(shards[i], home, self.lockstep.devices[i]) for i in here}

    def _prepare(self, name: str) -> None:
        """Find out how to run a step, and what the module holds."""
        self._trains = name == STEPS[0]
        self._is_manual = self._trains and not self._is_automatic
        self._meet = self._are_several and (
            self.is_locked or self._is_manual or self._layer_sync is not None
        )
        num_elsewhere = len(self.lockstep.devices) - len(self.replicas.devices)
        if self._meet and len(self.sizes) <= num_elsewhere:
            raise RuntimeError(
                f"A batch of {sum(self.sizes.values())} sample(s) leaves a process without any, "
                "which must meet the others in this step: use drop_last=True, or fewer replicas."
            )
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        self.replicas.find(*((schedulers, []) if self._meet else ([], schedulers)))
        optimizers = self.optimizers if self._trains else []
        self.replicas.unknown_code = unknown_code(self.replicas.module, optimizers)

    def _begin(self, name: str, *numbers: int) -> None:
        """Give the replicas the weights, buffers and attributes of the module."""
        epoch = self.replicas.module.current_epoch
        self.replicas.begin(STEPS.index(name), epoch, *numbers, meets=self._meet)
        self.edits.begin()
        self.updates.begin(self.optimizers if self._trains else [])
        if self._is_manual:
            self.gradients.push()

    def _run_replicas(self, step: Callable[[int], Any], records: dict[int, Record]) -> None:
        """Each in its turn, or together where they meet: every record is filled."""
        self.lockstep.begin()
        active = list(records)
        with ExitStack() as stack:
            stack.enter_context(refuse_other_optimizers(self.replicas))
            stack.enter_context(on_read("data", self._note_data_read))
            if self._trains and self._is_automatic:
                stack.enter_context(on_read("grad", self.gradients.push, once=True))
            if self._meet:
                stack.enter_context(self._meetings())
                stack.enter_context(self._synchronized_batch_norm())
                outputs = self.lockstep.run(step, active, list(self.sizes))
            else:
                outputs = self._take_turns(step, active)
        first = self.replicas.first
        edits = self.edits.find([i - first for i in active])
        for i, output, edit in zip(active, outputs, edits):
            record = records[i]
            record.output, record.edits = output, edit
            record.statistics = self.replicas.statistics(i - first)
            record.changes = self.replicas.merger.changes(i - first)

    def _note_data_read(self, tensor: Tensor) -> None:
        """A step has read `.data`, and may edit it without being counted."""
        if self.replicas.holds(tensor):
            self.edits.data_was_read = True
        else:  # of a gradient?
            self.gradients.is_manual_check_due = True

    def _meetings(self) -> AbstractContextManager:
        """Replicas meet at every `step` of an optimizer, its wrapper or a scheduler."""
        steps: dict[Any, Callable[..., Any]] = {
            each: partial(self.step_and_follow, each, each.step) for each in self.updates.optimizers
        }
        # Lightning's wrappers call `optimizer_step`
        steps |= {wrapper: wrapper.step for wrapper in self._lightning_optimizers}
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        return Meetings(self.lockstep, self.gradients, self.sizes).at_steps(steps, schedulers)

    def _synchronized_batch_norm(self) -> AbstractContextManager:
        """Inside the block BatchNorm layers meet, if that is asked for."""
        is_asked_for = self._layer_sync is not None
        return (
            synchronized_batch_norm(self.lockstep, self.replicas) if is_asked_for else nullcontext()
        )

    def _take_turns(self, step: Callable[[int], Any], active: list[int]) -> list[Any]:
        outputs: dict[int, Any] = {}
        self.in_plain_step = self._are_several
        try:
            for i in gpus_first(active, self.lockstep.devices):
                with self.turn(i):
                    outputs[i] = step(i)
        finally:
            self.in_plain_step = False
        return [outputs[i] for i in active]

    def _combine(self, records: dict[int, Record]) -> None:
        """k records become one step's. The rules: combining.py, metric_calls.py, merging.py."""
        if self._are_several:
            self.recorder.combine_calls(records)
        replicas = self.replicas
        if self._layer_sync is None:
            statistics = {i: each.statistics for i, each in records.items()}
            average_statistics(replicas.statistics(0), statistics, self.sizes)
        replicas.merger.combine({i: each.changes for i, each in records.items()}, self.sizes)
        self.edits.combine({i: each.edits for i, each in records.items()})
        if self._trains:  # the step may have edited the parameters of the replicas that ran
            if not self._is_automatic or len(self.sizes) < len(self.lockstep.devices):
                replicas.distrust()
            if replicas.is_distrusted:
                replicas.push_weights()
            self.shares = self.auto_split.end_step(self.shares)

    @contextmanager
    def turn(self, i: int) -> Iterator[None]:
        """Replica i's turn. An error is given a note that names it."""
        timed = self.auto_split.timed(i, self.lockstep.devices[i])
        here = i - self.replicas.first
        optimizers = self.updates.use_state_of(here, self.updates.optimizers)
        try:
            with timed, self.replicas.enter(here), optimizers:
                yield
        except Exception as error:
            error.add_note(f"raised in replica {i} on {self.lockstep.devices[i]}")
            raise

    def step_and_follow(
        self, optimizer: Optimizer, step: Callable[..., Any], closure: Any, **kwargs: Any
    ) -> Any:
        """Step the user's optimizer on the first replica, and let the others follow."""
        result = step(closure=closure, **kwargs)
        if self.scaler is not None:
            self.gradients.forget()  # unscaling edits them, and torch does not count it
        self.updates.is_check_due = self.is_check_due
        self.update_replicas(optimizer)
        self.own_updates = self.updates.was_repeated
        if not self._is_automatic:
            self.gradients.push()  # by the optimizer, or by unscaling
            self.updates.offer_state(optimizer)  # as it is after the update
        self._is_first_step = False
        return result

    @property
    def scaler(self) -> Any:
        return getattr(self.precision_plugin, "scaler", None)

    @property
    def is_check_due(self) -> bool:
        """Whether replicas are compared at this update: an epoch's first and last, every 50th."""
        trainer, step = self.replicas.module.trainer, self.replicas.module.global_step + 1
        is_last = trainer.is_last_batch or step == trainer.max_steps
        return self._is_first_step or is_last or step % CHECK_EVERY == 0

    @property
    def _is_automatic(self) -> bool:
        assert self.lightning_module is not None
        return self.lightning_module.automatic_optimization
