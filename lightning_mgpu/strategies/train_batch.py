"""`train_batch` of the book as a Lightning Strategy: k replicas, k shards, k losses, one gradient.

The Trainer calls `optimizer_step`, whose closure calls `training_step` and `backward`. Replicas take turns in the
caller's thread. GPUs work side by side all the same, as no call waits for a GPU. Where replicas must wait for each
other in the middle of a step (manual optimization, synchronised BatchNorm), `lockstep.py` runs them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mgpu.strategies.gradients import Gradients
from lightning_mgpu.strategies.lockstep import Lockstep
from lightning_mgpu.strategies.manual_optimization import meetings, only_known_optimizers
from lightning_mgpu.strategies.one_process import (
    OneProcess,
    autocast_like,
    find_device,
    gpus_first,
)
from lightning_mgpu.strategies.recording import Recorder, attributes
from lightning_mgpu.strategies.replicas import Replicas, check_layers
from lightning_mgpu.strategies.split_batch import (
    AutoSplit,
    gather,
    leaves,
    send,
    share_out,
    split_batch,
)
from lightning_mgpu.strategies.sync_batchnorm import synchronized_batch_norm
from lightning_mgpu.strategies.updates import Updates

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def _evaluation(name: str, context: str) -> Any:
    """The strategy's `validation_step`, say, inside a context of its precision plugin."""

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.is_split:
            return getattr(ParallelStrategy, name)(self, *args, **kwargs)
        with getattr(self.precision_plugin, context)():
            outputs = self._run(name, *args, **kwargs)
        return gather(outputs, list(self.sizes.values()), self.devices[0])

    return step


class TrainBatchStrategy(OneProcess, ParallelStrategy):
    """Trains k replicas of a module, each on its shard of the batch; for the options see `ManualAllreduceStrategy`.

    Subclasses say in `reduce_gradients` how gradients meet, and in `update_replicas` who makes the update.
    """

    replicas: Replicas
    sums_everywhere: (
        bool  # whether `reduce_gradients` leaves the sum in every replica, or in the first alone
    )

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
        self.own_updates = False  # whether every replica has made the last update itself
        self.sizes: dict[int, int] = {}  # the samples of the replicas that have some in this step
        self.loaded: set[int] = set()  # the loaders' batch sizes
        self._is_set_up = False

    # Devices

    @property
    def own_devices(self) -> list[torch.device]:
        return self.parallel_devices or [torch.device("cpu")]

    @property
    def devices(self) -> list[torch.device]:
        """One a replica."""
        own = self.own_devices
        return [
            device for device in own for _ in range((self.num_replicas or len(own)) // len(own))
        ]

    @property
    @override
    def root_device(self) -> torch.device:
        """The first; in a step, that of the replica which asks."""
        return self.devices[self.replicas.current if self._is_set_up else 0]

    @property
    def is_split(self) -> bool:
        """Whether there are replicas to split a step over. A single one steps aside: Lightning does it all."""
        return self._is_set_up and len(self.replicas.devices) > 1

    @override
    def setup_environment(self) -> None:
        self.check_launch()
        own, split, count = self.own_devices, self.split, self.num_replicas
        if count is not None and (
            count < 1 or count % len(own) or split is not None or len({d.type for d in own}) > 1
        ):
            raise MisconfigurationException(
                f"replicas={count}: choose a multiple of the {len(own)} device(s), which must be of one kind, and "
                "leave `split` out."
            )
        is_shares = (
            isinstance(split, list)
            and len(split) == len(own)
            and all(0 < s < float("inf") for s in split)
        )
        if split not in (None, "auto") and not is_shares:
            raise MisconfigurationException(
                f"split={split!r}: give 'auto', or one positive share a device ({len(own)})."
            )
        super().setup_environment()

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.lightning_module is not None
        devices = self.devices
        self.shares = self.split if isinstance(self.split, list) else [1.0] * len(devices)
        self.auto_split = AutoSplit(self.split == "auto")
        self.replicas = Replicas(
            self.lightning_module, devices, own_streams=self.num_replicas is not None
        )
        self.gradients = Gradients(
            self.replicas, self.turn, self.reduce_gradients, self.sums_everywhere
        )
        self.updates = Updates(self.replicas, replicas_update=self.sums_everywhere)
        self.lockstep = Lockstep(devices, self.turn)
        self.recorder = Recorder(self.replicas, self.lockstep)
        self._is_set_up = True
        if self.is_split:
            self._start_anew()
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
        for name in ("replicas", "gradients", "updates", "lockstep", "recorder"):
            vars(self).pop(name, None)
        super().teardown()

    # What subclasses differ in

    def reduce_gradients(self, gradients: dict[str, list[Tensor]]) -> None:
        """For every parameter, by its name, leave the sum of its k gradients in each of them, or in the first."""
        raise NotImplementedError

    def update_replicas(self, optimizer: Optimizer) -> None:
        """The first replica was updated: see to the others."""
        raise NotImplementedError

    # A step

    @override
    def process_dataloader(self, dataloader: object) -> object:
        size = getattr(getattr(dataloader, "batch_sampler", None), "batch_size", None)
        self.loaded |= {size} if isinstance(size, int) else set()
        return dataloader

    @override
    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.is_split:
            return super().training_step(batch, *args, **kwargs)
        with self.precision_plugin.train_step_context():
            outputs = self._run("training_step", batch, *args, **kwargs)
        whole = gather(outputs, list(self.sizes.values()), self.devices[0])
        losses: dict[int, Tensor] = {}
        for i, output in zip(self.sizes, outputs) if self._is_automatic else ():
            if output is not None:
                loss = output.get("loss") if isinstance(output, Mapping) else output
                if not isinstance(loss, Tensor):
                    return output  # Lightning says what is wrong with it
                losses[i] = loss
        if not losses:
            return whole
        loss = self.gradients.join(losses, self.sizes, self._is_one_graph)
        return {**whole, "loss": loss} if isinstance(whole, Mapping) else loss

    validation_step = _evaluation("validation_step", "val_step_context")
    test_step = _evaluation("test_step", "test_step_context")
    predict_step = _evaluation("predict_step", "predict_step_context")

    @property
    def _is_automatic(self) -> bool:
        return self.replicas.module.automatic_optimization

    def _run(self, name: str, batch: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """Run a step on every replica that gets samples, and return what they return."""
        module, replicas, trains = self.replicas.module, self.replicas, name == STEPS[0]
        all_sizes = share_out(batch, self.shares, self.devices[0], self.loaded)
        self.sizes = {i: size for i, size in enumerate(all_sizes) if size}
        is_alone = len(self.sizes) == 1  # it has the whole batch
        shards = [batch] if is_alone else split_batch(batch, all_sizes)
        is_manual = trains and not self._is_automatic
        meet = not is_alone and (self.is_locked or is_manual or self._layer_sync is not None)
        has_graph = any(isinstance(leaf, Tensor) and not leaf.is_leaf for leaf in leaves(batch))
        self._is_one_graph = self._layer_sync is not None or has_graph
        numbers = [
            arg for arg in (*args, *kwargs.values()) if isinstance(arg, int)
        ]  # of the batch, and its loader

        home, order = self.devices[0], gpus_first(self.sizes, self.devices)
        # all are sent before the first replica runs: a copy from a GPU waits for what was asked of it before
        sent = {i: send(shards[i], home, self.devices[i]) for i in self.sizes}

        def step(i: int) -> Any:
            with autocast_like(home, self.devices[i]):
                return getattr(module, name)(sent.pop(i), *args, **kwargs)

        optimizers = self.optimizers if trains else []
        replicas.hooks = self.updates.find_hooks(name, optimizers)
        recording = nullcontext() if is_alone else self.recorder.recording(self.sizes)
        with (
            recording,
            only_known_optimizers(self),
        ):  # the former puts attributes on the module: `begin` follows
            is_in_order = not meet and order == list(self.sizes)
            replicas.begin(
                STEPS.index(name),
                module.current_epoch,
                *numbers,
                meet=meet,
                is_in_order=is_in_order,
            )
            self.updates.begin(optimizers)
            if is_manual:
                self.gradients.copy_changed()
            looking = (
                self.gradients.copied_on_demand() if trains and not is_manual else nullcontext()
            )
            with looking:
                if meet:
                    with meetings(self, self.updates.optimizers), self._synchronized():
                        outputs = self.lockstep.run(step, list(self.sizes))
                else:
                    done = {i: self._in_turn(i, step) for i in order}
                    outputs = [done[i] for i in self.sizes]
            if self._layer_sync is None:
                replicas.average_statistics(self.sizes)
            replicas.end([i for i in self.sizes if i])
            if trains:  # the step may have edited the parameters of the replicas that ran
                replicas.is_stale |= is_manual or len(self.sizes) < len(all_sizes)
                replicas.copy_edited()
                self.shares = self.auto_split.end_step(self.shares)
        return outputs

    def _in_turn(self, i: int, step: Callable[[int], Any]) -> Any:
        with self.turn(i):
            return step(i)

    @contextmanager
    def turn(self, i: int) -> Iterator[None]:
        """Replica i's turn. An error is given a note that names it."""
        try:
            timed, updates = (
                self.auto_split.timed(i, self.devices[i]),
                self.updates.turn(i, self.updates.optimizers),
            )
            with timed, self.replicas.turn(i), updates:
                yield
        except Exception as error:
            error.add_note(f"raised in replica {i} on {self.devices[i]}")
            raise

    def _synchronized(self) -> AbstractContextManager:
        return nullcontext() if self._layer_sync is None else synchronized_batch_norm(self.lockstep)

    # From losses to updates

    @override
    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Compute and reduce the gradients of all shards, before any hook or callback looks at them."""
        if not self.is_split:
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        if self._is_automatic:
            return self._backward(closure_loss, optimizer, *args, **kwargs)

        def together(losses: dict[int, Tensor]) -> Tensor:
            whole = self.gradients.join(losses, self.sizes, self._is_one_graph)
            return self._backward(whole, optimizer, *args, **kwargs)

        if self.lockstep.running:
            return self.lockstep.meet(("manual_backward", None), closure_loss, together)  # type: ignore[no-any-return]
        return together({0: closure_loss})  # one replica has the whole batch

    def _backward(
        self, loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        self.gradients.are_reduced = False
        passes, itself = [], torch.autograd.backward

        def watched(*args: Any, **kwargs: Any) -> None:
            passes.append(True)
            itself(*args, **kwargs)

        with self._synchronized(), attributes([(torch.autograd, "backward", watched)]):
            loss = super().backward(loss, optimizer, *args, **kwargs)
        if (
            passes and not self.gradients.are_reduced
        ):  # a `backward` of the user's own may leave a batch out
            raise RuntimeError(
                "backward must be for all parameters, without inputs=: nothing reduced the gradients."
            )
        if not self._is_automatic:
            self.gradients.copy_changed()  # by the module's own `backward`
            # hooks may have stepped an optimizer, and the step's next forward pass is to come
            self.replicas.copy_edited(self.replicas.hooks)
        self.replicas.is_stale = True  # before its update an optimizer may try other weights
        return loss

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        step = partial(super().optimizer_step, optimizer, model=model, **kwargs)
        return self.step_all(optimizer, step, closure) if self.is_split else step(closure=closure)

    def step_all(
        self, optimizer: Optimizer, step: Callable[..., Any], closure: Any, **kwargs: Any
    ) -> Any:
        """Step the user's optimizer, which has the first replica's parameters, and see to the other replicas."""
        result = step(closure=closure, **kwargs)
        if getattr(self.precision_plugin, "scaler", None) is not None:
            self.gradients.forget()  # unscaling edits them, and torch does not count it
        self.update_replicas(optimizer)
        if not self._is_automatic:
            self.gradients.copy_changed()  # by the optimizer, or by unscaling
            self.updates.offer_state(optimizer)  # as it is after the update
        return result

    # Around steps, where somebody may edit weights and the optimizers' states

    def _start_anew(self) -> None:
        if self.is_split:
            self.replicas.warn_of_edited_buffers()
            self.replicas.is_stale = self.replicas.is_watched = True
            self.gradients.is_checked = self.gradients.is_compared = False
            self.gradients.forget()
            self.recorder.forget_rows()
            self.updates.start_anew()
            check_layers(self.replicas.module, sync_batchnorm=self._layer_sync is not None)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self._start_anew()

    @override
    def on_validation_start(self) -> None:
        self._start_anew()

    on_validation_end = on_test_start = on_predict_start = on_validation_start

    @override
    def on_train_end(self) -> None:
        if self.is_split:
            self.replicas.warn_of_edited_buffers()

    on_test_end = on_predict_end = on_train_end

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._start_anew()  # `on_save_checkpoint` may edit
        return super().lightning_module_state_dict()
