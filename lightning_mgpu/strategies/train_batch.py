"""`train_batch` of the book as a Lightning Strategy: k replicas, k shards, k losses, one gradient.

The Trainer calls `optimizer_step`, whose closure calls `training_step` and `backward`. Replicas
take turns in the caller's thread. GPUs work side by side all the same, as no call waits for a GPU.
Where replicas must wait for each other in the middle of a step (manual optimization, synchronised
BatchNorm, `lockstep=True`), `lockstep.py` runs them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from lightning.fabric.utilities.data import _auto_add_worker_init_fn
from lightning.fabric.utilities.exceptions import MisconfigurationException
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
    replace_attributes,
)
from lightning_mgpu.strategies.equality import digest_batch, digest_of_all
from lightning_mgpu.strategies.gradients import Gradients
from lightning_mgpu.strategies.hooks import TORCH_OPTIMIZERS, may_edit_before_checks, unknown_code
from lightning_mgpu.strategies.launching import refuse_process_groups
from lightning_mgpu.strategies.lockstep import Lockstep
from lightning_mgpu.strategies.loss_weight import WEIGHT, Window, find_weights, nothing
from lightning_mgpu.strategies.manual_optimization import Meetings
from lightning_mgpu.strategies.records import Record, Recorder
from lightning_mgpu.strategies.reducing import Reducer
from lightning_mgpu.strategies.replicas import Replicas, check_layers
from lightning_mgpu.strategies.split_batch import cut_graph, leaves, send, share_out, split_batch
from lightning_mgpu.strategies.sync_batchnorm import synchronized_batch_norm
from lightning_mgpu.strategies.updates import Updates, refuse_other_optimizers

CHECK_EVERY = 50  # updates, between comparisons of replicas that make their own
SAMPLE = 4096  # elements of each tensor in a batch, compared between processes in every step
STEPS = ("training_step", "validation_step", "test_step", "predict_step")


class TrainBatchStrategy(Collectives, ParallelStrategy):
    """Trains k replicas of a module, each on its shard of the batch.

    For the options see `ManualAllreduceStrategy`. Subclasses say in `reduce_gradients` how
    gradients are summed, and in `update_replicas` who makes the update.
    """

    replicas: Replicas
    weighs_losses = True  # by the weights that `training_step` returns
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
        self._is_first_step = True  # since weights may have been edited
        self._batch_idx = -1  # a step need not have it as an argument
        self._is_set_up = False

    # Devices

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
        if self._is_set_up:
            return self.lockstep.devices
        here, rank, num = self.devices_here, self.process_rank, self.num_all_processes
        there = [self._own_devices[0]] * len(here)
        return [device for i in range(num) for device in (here if i == rank else there)]

    @property
    @override
    def root_device(self) -> torch.device:
        """The first; in a step, that of the replica which asks."""
        if self._is_set_up:
            return self.replicas.devices[self.replicas.current]
        return self._own_devices[0]

    @property
    def is_split(self) -> bool:
        """Whether there are replicas to split a step over. With one, Lightning does it all."""
        return self._is_set_up and len(self.devices) > 1

    @override
    def check_launch(self) -> None:
        super().check_launch()
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
        self.reducer = Reducer(self.replicas, self.processes, *how_to_reduce)
        self.gradients = Gradients(self.replicas, self.turn, self.reducer)
        self.updates = Updates(self.replicas, replicas_update=self.sums_everywhere)
        self.lockstep = Lockstep(devices, self.turn, self.processes)
        self.recorder = Recorder(self.replicas, self.lockstep)
        self.window = Window(self.replicas.module)
        self._is_set_up = True
        if self.is_split:
            self._distrust_replicas()
        super().setup(trainer)

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    @override
    def teardown(self) -> None:
        if self._is_set_up:
            self.replicas.release()
        self._is_set_up = False
        for name in ("replicas", "reducer", "gradients", "updates", "lockstep", "recorder"):
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

    # A step

    @override
    def process_dataloader(self, dataloader: object) -> object:
        size = getattr(getattr(dataloader, "batch_sampler", None), "batch_size", None)
        self.loader_batch_sizes |= {size} if isinstance(size, int) else set()
        # private: before Lightning does it by the process's rank, as workers draw the same in all
        _auto_add_worker_init_fn(dataloader, rank=0)
        return dataloader

    @override
    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self._is_automatic:
            self.window.begin_batch()
        if not self.is_split:
            output = super().training_step(batch, *args, **kwargs)
            return self._join_losses({0: output}, output) if self._is_automatic else output
        with self.precision_plugin.train_step_context():
            outputs = self._run("training_step", batch, *args, **kwargs)
        by_replica = dict(zip(self.sizes, outputs))
        if self._is_automatic and all(isinstance(output, Tensor) for output in outputs):
            return self._join_losses(by_replica, None)
        whole = self._gather("training_step", outputs)
        return self._join_losses(by_replica, whole) if self._is_automatic else whole

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_split:
            return super().validation_step(*args, **kwargs)
        with self.precision_plugin.val_step_context():
            return self._gather("validation_step", self._run("validation_step", *args, **kwargs))

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_split:
            return super().test_step(*args, **kwargs)
        with self.precision_plugin.test_step_context():
            return self._gather("test_step", self._run("test_step", *args, **kwargs))

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        if not self.is_split:
            return super().predict_step(*args, **kwargs)
        with self.precision_plugin.predict_step_context():
            return self._gather("predict_step", self._run("predict_step", *args, **kwargs))

    @property
    def _is_automatic(self) -> bool:
        assert self.lightning_module is not None
        return self.lightning_module.automatic_optimization

    def _gather(self, name: str, outputs: list[Any]) -> Any:
        sizes, notes = list(self.sizes.values()), self.replicas.notes
        return gather(outputs, sizes, self.devices[0], notes, f"the output of {name}")

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
            if self.processes.num > 1:
                layers = [layer for _, layer in self.replicas.modules()]
                known = [*self.replicas.module.modules(), *layers, *self.recorder.metrics, self]
                self.processes.known = known
            digests = self._digests(batch, is_first=numbers[0] == 0)
            self._run_replicas(name, shards, records, *args, **kwargs)
            where = f"{name} at step {self.replicas.module.global_step}"
            records = self._share(where, records, digests)
            self._combine(records)
        return [record.output for record in records.values()]

    def _split(self, batch: Any) -> dict[int, Any]:
        """The shards of the replicas that get samples, on their devices."""
        home = self.devices[0]
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
        return {i: send(shards[i], home, self.devices[i]) for i in here}

    def _prepare(self, name: str) -> None:
        """Find out how to run a step, and what the module holds."""
        self._trains = name == STEPS[0]
        self._is_manual = self._trains and not self._is_automatic
        self._meet = self._are_several and (
            self.is_locked or self._is_manual or self._layer_sync is not None
        )
        if self._meet and len(self.sizes) <= len(self.devices) - len(self.replicas.devices):
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
        self.updates.begin(self.optimizers if self._trains else [])
        if self._is_manual:
            self.gradients.push()

    def _run_replicas(
        self,
        name: str,
        shards: dict[int, Any],
        records: dict[int, Record],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Each in its turn, or together where they meet: every record is filled."""

        def step(i: int) -> Any:
            with autocast_like(self.devices[0], self.devices[i]):
                return getattr(self.replicas.module, name)(shards.pop(i), *args, **kwargs)

        self.lockstep.is_one_graph = False
        active = list(shards)
        with ExitStack() as stack:
            stack.enter_context(refuse_other_optimizers(self.replicas))
            stack.enter_context(on_read("data", self._note_data_read))
            if self._trains and self._is_automatic:
                stack.enter_context(on_read("grad", self.gradients.push, once=True))
            if self._meet:
                stack.enter_context(self._meetings())
                if self._layer_sync is not None:
                    stack.enter_context(synchronized_batch_norm(self.lockstep))
                outputs = self.lockstep.run(step, active, list(self.sizes))
            else:
                outputs = self._take_turns(step, active)
        first = self.replicas.first
        edits = self.replicas.edits([i - first for i in active])
        for i, output, edit in zip(active, outputs, edits):
            record = records[i]
            record.output, record.edits = output, edit
            record.statistics = self.replicas.statistics(i - first)
            record.changes = self.replicas.merger.changes(i - first)

    def _digests(self, batch: Any, is_first: bool) -> dict[str, list[int]]:
        """What must be the same in all processes: in every step a sample of the batch.

        Where replicas are compared, it is the whole batch, and the weights.
        """
        if self.processes.num == 1:
            return {}
        if not (self.is_check_due if self._trains else is_first):
            return {"batch": digest_batch(leaves(batch), SAMPLE)}
        refuse_process_groups()
        return {"batch": digest_batch(leaves(batch))} | self._digests_of_weights()

    def _digests_of_weights(self) -> dict[str, list[int]]:
        parameters, buffers = self.replicas.parameter_sets, self.replicas.buffer_sets
        return {
            "weights": [digest_of_all(first for first, *_ in parameters.values())],
            "buffers": [digest_of_all(first for first, *_ in buffers.values())],
            "random state": [digest_of_all([torch.get_rng_state()])],
        }

    def _share(
        self, where: str, records: dict[int, Record], digests: dict[str, list[int]]
    ) -> dict[int, Record]:
        """The records of all processes' replicas, in order."""
        shared = self.processes.share(where, (records, digests))
        for i, (_, others) in enumerate(shared):
            if wrong := [what for what, digest in others.items() if digest != digests[what]]:
                raise RuntimeError(
                    f"process {i} differs from process {self.process_rank} in its {wrong[0]}, in "
                    f"{where}: all must run the same program, with the same seed and batches."
                )
        return {i: record for part, _ in shared for i, record in part.items()}

    def _note_data_read(self, tensor: Tensor) -> None:
        """A step has read `.data`, and may edit it without being counted."""
        if self.replicas.holds(tensor):
            self.replicas.data_was_read = True
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

    def _take_turns(self, step: Callable[[int], Any], active: list[int]) -> list[Any]:
        outputs: dict[int, Any] = {}
        self.in_plain_step = self._are_several
        try:
            for i in gpus_first(active, self.devices):
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
        replicas.compare_edited({i: each.edits for i, each in records.items()})
        if self._trains:  # the step may have edited the parameters of the replicas that ran
            if not self._is_automatic or len(self.sizes) < len(self.devices):
                replicas.distrust()
            if replicas.is_distrusted:
                replicas.push_weights()
            self.shares = self.auto_split.end_step(self.shares)

    @contextmanager
    def turn(self, i: int) -> Iterator[None]:
        """Replica i's turn. An error is given a note that names it."""
        timed = self.auto_split.timed(i, self.devices[i])
        here = i - self.replicas.first
        optimizers = self.updates.use_state_of(here, self.updates.optimizers)
        try:
            with timed, self.replicas.enter(here), optimizers:
                yield
        except Exception as error:
            error.add_note(f"raised in replica {i} on {self.devices[i]}")
            raise

    # From losses to updates

    def _join_losses(self, outputs: dict[int, Any], whole: Any) -> Any:
        """The output of a training step for the Trainer, with the whole batch's loss."""
        losses: dict[int, Tensor] = {}
        for i, output in outputs.items():
            if output is not None:
                loss = output.get("loss") if isinstance(output, Mapping) else output
                if not isinstance(loss, Tensor):
                    return output  # Lightning says what is wrong with it
                losses[i] = loss
        if not losses:
            return whole
        weights = find_weights(outputs)
        weight = {WEIGHT: sum(weights.values())} if weights else {}
        loss = self.window.weigh(self._join(losses, weights), weight.get(WEIGHT))
        if isinstance(whole, Mapping):
            return whole if loss is whole["loss"] else {**whole, "loss": loss, **weight}
        return loss

    def _join(self, losses: dict[int, Tensor], weights: dict[int, float]) -> Tensor:
        if not self.is_split:
            return losses[0] if weights.get(0, 1) else nothing(losses[0])
        is_one_graph = self.lockstep.is_one_graph
        return self.gradients.join(losses, weights or self.sizes, is_one_graph, self.batch_graph)

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Compute and reduce the gradients of all shards, before any hook looks at them."""
        if self.is_split and self._is_automatic:
            return self._backward(closure_loss, optimizer, *args, **kwargs)
        # `self.manual_backward(loss, weight=n)`
        weight = {WEIGHT: kwargs.pop(WEIGHT)} if WEIGHT in kwargs else {}

        def together(given: dict[int, tuple[Tensor, Any]]) -> Tensor:
            weights = find_weights({i: weight for i, (_, weight) in given.items()})
            loss = self._join({i: loss for i, (loss, _) in given.items()}, weights)
            if weights and not any(weights.values()):
                self.window.fill_gradients()
            if not self.is_split:
                return super(TrainBatchStrategy, self).backward(loss, optimizer, *args, **kwargs)
            return self._backward(loss, optimizer, *args, **kwargs)

        given = closure_loss, weight
        if self.is_split and self.lockstep.running:
            loss: Tensor = self.lockstep.meet(("manual_backward", None), given, together)
            return loss
        return together({0: given})  # one replica has the whole batch

    def _backward(
        self, loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        self.gradients.are_reduced = False
        self.reducer.is_check_due = self.is_check_due
        passes = []

        def noted(name: str) -> tuple[Any, str, Any]:
            function = getattr(torch.autograd, name)

            def note(*args: Any, **kwargs: Any) -> Any:
                passes.append(name)
                return function(*args, **kwargs)

            return torch.autograd, name, note

        with replace_attributes([noted("backward"), noted("grad")]):
            loss = super().backward(loss, optimizer, *args, **kwargs)
        if passes and not self.gradients.are_reduced:
            # a `backward` of the user's own may leave a batch out
            raise RuntimeError(
                "backward must be for all parameters, by loss.backward() without inputs=: nothing "
                "reduced the gradients."
            )
        if not self._is_automatic:
            self.gradients.push()  # those that the module's own `backward` has changed
            # hooks may have stepped an optimizer, and the step's next forward pass is to come
            self.replicas.push_weights(is_sure=False)
        self.replicas.distrust()  # before its update an optimizer may try other weights
        return loss

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        step = partial(super().optimizer_step, optimizer, model=model, **kwargs)
        closure = self.window.closing(closure)
        if not self.is_split:
            return step(closure=closure)
        if type(optimizer) not in TORCH_OPTIMIZERS:
            self.replicas.distrust()  # it may edit weights before its closure runs the step
        return self.step_and_follow(optimizer, step, closure)

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

    # Around steps, where weights and the optimizers' states may be edited

    @property
    def is_check_due(self) -> bool:
        """Whether replicas are compared at this update: an epoch's first and last, every 50th."""
        trainer, step = self.replicas.module.trainer, self.replicas.module.global_step + 1
        is_last = trainer.is_last_batch or step == trainer.max_steps
        return self._is_first_step or is_last or step % CHECK_EVERY == 0

    def _distrust_replicas(self) -> None:
        if not self.is_split:
            return
        module = self.replicas.module
        were_equal = self.updates.was_repeated and self.replicas.are_as_marked
        if were_equal and not may_edit_before_checks(module):
            self.updates.check_equality()
        self.replicas.notes.flush()
        self.replicas.distrust()
        self._is_first_step = self.gradients.is_manual_check_due = True
        self.gradients.forget()
        self.updates.copy_again()
        check_layers(module, sync_batchnorm=self._layer_sync is not None)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._batch_idx = batch_idx
        if batch_idx == 0:
            self._distrust_replicas()

    @override
    def on_validation_start(self) -> None:
        self._batch_idx = -1
        self._distrust_replicas()

    on_validation_end = on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_start

    @override
    def on_train_end(self) -> None:
        self._distrust_replicas()
        if self.processes.num > 1:
            self._share("the end of training", {}, self._digests_of_weights())

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._distrust_replicas()  # `on_save_checkpoint` may edit
        return super().lightning_module_state_dict()
