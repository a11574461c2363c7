"""The textbook's data parallelism as a Lightning Strategy (d2l.ai, 'Training on Multiple GPUs').

README.md names the place of each function of the chapter; `__init__.py` has the way of a batch.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, Literal
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import LBFGS

from lightning_mgpu.allreduce import check_allreduce, textbook_allreduce
from lightning_mgpu.processes import ProcessPerDeviceStrategy
from lightning_mgpu.routes.buckets import Bucket, Gradients
from lightning_mgpu.routes.courier import Courier
from lightning_mgpu.routes.dispatcher import Dispatcher
from lightning_mgpu.routes.sums import Route, sum_by_all, sum_by_owners, sum_in_place, take_all
from lightning_mgpu.seeds import seed_generators
from lightning_mgpu.shards.checksum import checksum
from lightning_mgpu.shards.loader import shares_of_batch
from lightning_mgpu.shards.reader import Shards, shards_of
from lightning_mgpu.shards.split_batch import num_samples
from lightning_mgpu.strategies.buffers import read_buffers, write_buffers
from lightning_mgpu.strategies.loss import scale_gradient, split_loss
from lightning_mgpu.strategies.sync_batchnorm import CPUSyncBatchNorm
from lightning_mgpu.strategies.window import Window, get_gradients, set_gradients

SEED = "seed of steps"  # of the fit that a checkpoint is of
BUFFERS = "buffers"  # the key of their route
BUCKET_CAP_MB = 4.0


class ManualAllreduceStrategy(ProcessPerDeviceStrategy):
    """k replicas of the module, a process per device, equal by a hand-written allreduce.

    Args:
        allreduce: Leaves the sum of k tensors, one per replica, in each of them (see
            `lightning_mgpu.allreduce`). On the command line: its dotted path.
        replicas: k, a multiple of the number of processes. A process runs its replicas one after
            the other with one set of weights. The bits of the trained weights depend on k, and not
            on the number of devices of one kind. Left out: one per device.
        bucket_cap_mb: Gradients of a bucket, which is sent as soon as all of them are there. With 0
            they are sent together, after the backward pass. It changes no bits. Left out: 4 between
            CPUs of several machines, else 0.
        parallel_devices, process_group_backend, timeout, start_method: As for DDPStrategy.

    Raises:
        ValueError: When `fit` begins, if `allreduce` does not compute the sum in place.
    """

    sums_in_place = True  # where processes have memory in common
    _courier: Any = None
    _dispatcher: Any = None
    _window: Window | None = None
    _buffers: list[Tensor] | None = None  # of each replica here, until they are shared
    _seed = 0  # for what the steps of this fit draw

    def __init__(
        self,
        allreduce: Callable[[list[Tensor]], None] = textbook_allreduce,
        replicas: int | None = None,
        bucket_cap_mb: float | None = None,
        parallel_devices: list[str] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=5),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        if not callable(allreduce) or (replicas is not None and replicas < 1):
            raise ValueError(f"{allreduce=}, {replicas=}: needed are a function, and a count >= 1")
        if bucket_cap_mb is not None and not 0 <= bucket_cap_mb < math.inf:
            raise ValueError(f"{bucket_cap_mb=}: needed is a number of MB; 0 is one bucket")
        super().__init__(
            parallel_devices=[torch.device(each) for each in parallel_devices or ()] or None,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self.allreduce, self.replicas = allreduce, replicas
        self.bucket_cap_mb = bucket_cap_mb

    def setup(self, trainer: Trainer) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return super().setup(trainer)
        for k in {self.num_replicas, 3, 4}:  # with two, sums in any order are equal
            check_allreduce(self.allreduce, [self.root_device] * k)
        is_own = not self.module.automatic_optimization or is_overridden("backward", self.module)
        hook = "on_before_batch_transfer"
        hooks: Any = trainer._data_connector._datahook_selector
        is_own = is_own or is_overridden(hook, hooks.get_instance(hook))
        if self.num_local > 1 and (self._layer_sync or is_own):
            raise MisconfigurationException(
                "sync_batchnorm, manual optimization, `on_before_batch_transfer` and a module's "
                "own `backward` need one replica per process: leave out `replicas`."
            )
        if self._layer_sync and not self.is_alone:
            if self.root_device.type == "cpu":
                self._layer_sync = CPUSyncBatchNorm()
            self.model = self._layer_sync.apply(self.module)
        super().setup(trainer)
        # another one in a script's next fit, and the same after the same `seed_everything`
        self._seed = crc32(torch.get_rng_state().numpy().data)
        self._dispatcher, self._window, self._buffers = None, None, None
        self._layout: dict[Tensor, Any] = {}
        is_on_cpu, timeout = self.root_device.type == "cpu", timedelta(seconds=self.meeting.timeout)
        # of this fit: a group that is kept would hand a failed fit's messages to the next one
        group = None if self.is_alone else dist.new_group(timeout=2 * timeout)
        self._courier = Courier(self.meeting, group, bool(self.meeting.cells) and is_on_cpu)
        default = BUCKET_CAP_MB if is_on_cpu else 0
        cap = default if self.bucket_cap_mb is None else self.bucket_cap_mb
        self._cap = cap * 1e6
        # a module's own pass may edit gradients, and one of NCCL's groups must not wait for another
        is_own = is_overridden("backward", self.module) or bool(self._layer_sync and not is_on_cpu)
        is_own |= type(self).exchange_gradients is not ManualAllreduceStrategy.exchange_gradients
        self._starts_in_pass = self._cap > 0 and not is_own
        self.is_in_step = self._is_blocked = False

    def save_checkpoint(self, checkpoint: Any, *args: Any, **kwargs: Any) -> None:
        super().save_checkpoint({**checkpoint, SEED: self._seed}, *args, **kwargs)

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        self._seed = checkpoint.get(SEED, self._seed)
        super().load_optimizer_state_dict(checkpoint)

    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The hooks that move a batch are called per shard, and draw the same in any process."""
        if not self.module.trainer.training or self.num_replicas == 1:
            return super().batch_to_device(batch, *args, **kwargs)
        moved = []
        for i, shard in enumerate(shards_of(batch)):
            if isinstance(batch, Shards):  # which Lightning does not convert
                shard = self.precision_plugin.convert_input(shard)
            with self._random_numbers_of(i, "transfer"):
                moved.append(super().batch_to_device(shard, *args, **kwargs))
        return Shards(moved) if isinstance(batch, Shards) else moved[0]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.module.trainer.fit_loop.total_batch_idx == 1:
            self.compare_weights()  # after the first batch, and later before each checkpoint

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._batch, outputs = batch, []
        shards = shards_of(batch)
        if len(shards) != self.num_local:
            raise MisconfigurationException(
                "Training loaders in a list or a dict: leave out `replicas`."
            )
        if self.num_replicas == 1:
            return self._weigh([super().training_step(batch, *args, **kwargs)])
        before = self._look_at_weights()
        if self._buffers:
            self._take_edited(self._buffers, 0)
        buffers = self._buffers or [read_buffers(self.module)] * self.num_local
        self._buffers = []
        for i, shard in enumerate(shards):
            if i > 0:
                write_buffers(self.module, buffers[i][None])
            with self._log_as(shard), self._random_numbers_of(i, "step"):
                outputs.append(super().training_step(shard, *args, **kwargs))
            # now: in the backward pass, activation checkpointing may run layers a second time
            self._buffers.append(read_buffers(self.module, len(buffers[i])))
            if i == 0 and self._look_at_weights() != before:
                raise MisconfigurationException(
                    "`training_step` edits weights, which several replicas of one process have in "
                    "common: leave out `replicas`, or edit in `on_train_batch_end`."
                )
        self._seen_buffers = self._look_at_buffers()
        if not len(self._buffers[0]):
            self._buffers = None
        if not self.module.automatic_optimization:  # there may be no backward pass after them
            self.share_buffers()
        return self._weigh(outputs)

    def _take_edited(self, buffers: list[Tensor], i: int) -> None:
        """Hooks may have edited the module's buffers, which are those of replica i here."""
        edited = read_buffers(self.module, len(buffers[i]))
        if self.num_local > 1 and not torch.equal(edited, buffers[i]):
            raise MisconfigurationException(
                "A hook has edited buffers within an update, of one of several replicas here: "
                "edit them in `on_train_batch_end` of its last batch, or leave out `replicas`."
            )
        buffers[i] = edited

    def _look_at_buffers(self) -> Any:
        """Another value after most edits. It does not wait for the device."""
        return [(b._version, b.data_ptr()) for b in self.module.buffers()]

    def _look_at_weights(self) -> Any:
        """Another value after an edit. A checksum waits for the device, but sees `.data`, too.

        It is of all weights in two steps, and else of the beginning of those without a gradient,
        which are edited by hand.
        """
        weights = [*self.module.parameters()] if self.num_local > 1 else []
        looked_at = [p.detach().flatten()[:256] for p in weights if not p.requires_grad]
        if self.module.trainer.fit_loop.total_batch_idx in (0, 3):
            looked_at = weights
        return [(p._version, p.data_ptr()) for p in weights], checksum(looked_at)

    @contextmanager
    def _random_numbers_of(self, i: int, purpose: str) -> Iterator[None]:
        """Random numbers by batch and replica: dropout draws the same in any process."""
        self.keep_generators()
        batch_idx = self.module.trainer.fit_loop.total_batch_idx + 1  # -1 at the first transfer
        seed_generators(self._seed, purpose, batch_idx, self.local_replicas[i])
        yield
        self.put_back_generators()

    @contextmanager
    def _log_as(self, shard: Any) -> Iterator[None]:
        """`self.log` weighs a mean by the samples of the batch that it finds in here."""
        results, batch = self.module.trainer._results, self.module.trainer._results.batch
        results.batch, results.batch_size = shard, None
        self.is_in_step = self.num_local > 1
        yield
        self.is_in_step = False
        results.batch, results.batch_size = batch, None
        if isinstance(batch, Shards):
            with suppress(ValueError):
                results.batch_size = sum(map(num_samples, batch.shards))

    def share_buffers(self, rows: Tensor | None = None) -> None:
        """Set the buffers by those of all replicas, (k, bytes), if they differ."""
        if rows is None and self._buffers and len(self._buffers[0]):
            self._start_buffers()
            self.gather(np.zeros(1, np.uint8), BUFFERS)
            rows = self._courier.finish()[BUFFERS]
        if rows is not None:
            write_buffers(self.module, rows.view(self.num_replicas, -1))
        self._buffers = None

    def _start_buffers(self, waits: bool = False) -> None:
        if self._buffers:
            row = torch.cat(self._buffers)
            self._courier.start(BUFFERS, take_all(row, self.world_size), waits)

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self.module.trainer.state.fn == TrainerFn.FITTING:
            self.share_buffers()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights of a checkpoint: all processes ask for them, before anything else."""
        if self.module.trainer.state.fn == TrainerFn.FITTING:
            self.share_buffers()
        return super().lightning_module_state_dict()

    def compare_weights(self) -> None:
        self.share_buffers()
        super().compare_weights()

    def _weigh(self, outputs: list[Any]) -> Any:
        """One loss for Lightning, in whose backward pass each shard counts by its share."""
        if not self.module.automatic_optimization:
            return outputs[0]
        losses, weights = zip(*map(split_loss, outputs))
        if self.num_replicas == 1 and weights[0] is None:
            self.share_out(weights)
            return outputs[0]
        if any(loss is None for loss in losses):
            raise MisconfigurationException(
                "`training_step` returned None: every shard needs a loss. To leave one out of the "
                'mean, return {"loss": loss, "weight": 0}.'
            )
        self._losses, self._shares = losses, self.share_out(weights)
        if self.num_local == 1:
            loss = scale_gradient(losses[0], self._shares[0])
        else:
            total = sum(self._shares)
            mean: Any = torch.zeros_like(losses[0])
            for each, share in zip(losses, self._shares):
                if share:  # a loss with weight 0 may be NaN: it does not count
                    mean += each.detach() * (share / total)
            loss = self._leaf = mean.requires_grad_()
        return {**outputs[-1], "loss": loss} if isinstance(outputs[-1], Mapping) else loss

    def share_out(self, weights: Sequence[float | None]) -> list[float]:
        """The factors of the losses here: by their weights, or by the samples of their shards."""
        window, has_weights = self._open_window(), weights[0] is not None
        if len({weight is None for weight in weights}) > 1:
            what = "all of an update need one, or none"
            raise ValueError(f"The losses of a batch have the weights {weights}: {what}.")
        if not has_weights:
            shares, total = self.find_shares(), None
        else:  # their sum is known nowhere else
            here = np.array(weights, np.float64)
            all_weights = self.gather_weights(here)
            total = float(all_weights.sum())
            if not np.isfinite(total) or (0 in all_weights and self._layer_sync):
                what = "their sum must be finite, and with sync_batchnorm each > 0"
                raise ValueError(f"Losses of a batch have weights {all_weights.tolist()}: {what}.")
            shares = (here / (total or 1.0)).tolist()
        self._my_share = sum(shares)
        return window.add(shares, total)

    def find_shares(self) -> list[float]:
        """The share of each replica here in the samples of the global batch."""
        if self.num_replicas == 1:
            return [1.0]
        return shares_of_batch(self.module.trainer, self._batch)

    def gather_weights(self, weights: np.ndarray) -> np.ndarray:
        """The weights of all replicas' losses."""
        return self.gather(weights, "weights of losses")

    def _open_window(self) -> Window:
        trainer = self.module.trainer
        if self._window is None or self._window.epoch != trainer.current_epoch:
            num_batches = trainer.accumulate_grad_batches
            self._window = Window(self.num_local, num_batches, trainer.current_epoch)
        return self._window

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        module, parameters = self.module, list(self.module.parameters())
        weight = kwargs.pop("weight", None)  # of `manual_backward`
        if not module.automatic_optimization:
            [factor] = self.share_out([weight])
            if factor != 1:
                closure_loss = scale_gradient(closure_loss, factor)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        if self._buffers and (self.num_local == 1 or self._look_at_buffers() != self._seen_buffers):
            self._take_edited(self._buffers, -1)
        window = self._open_window()
        window.open(parameters)
        with self._start_in_pass([]) if self.num_local == 1 else nullcontext():
            self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        if self.num_local == 1:
            window.keep([get_gradients(parameters)])
        else:
            window.keep(self._run_local_passes(window.gradients, parameters))
        if self._buffers:  # as before the backward pass, until they are shared
            write_buffers(module, self._buffers[0][None])
        if not self._is_blocked:
            self.exchange_gradients(window.gradients, window.mean_shares)
            self._window = None
        return self.precision_plugin.post_backward(closure_loss, module)

    def _run_local_passes(
        self, gradients: list[Gradients], parameters: list[Tensor]
    ) -> list[Gradients]:
        """A backward pass per replica. Lightning's own has left its loss scale at the leaf."""
        for i, (loss, share) in enumerate(zip(self._losses, self._shares)):
            set_gradients(parameters, gradients[i])
            is_last = i + 1 == self.num_local
            with self._start_in_pass(gradients[:i]) if is_last and share else nullcontext():
                if share:
                    loss.backward(self._leaf.grad * share)
            gradients[i] = get_gradients(parameters)
        set_gradients(parameters, gradients[0])
        return gradients

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning enters this for all batches of an accumulation window but the last."""
        self._is_blocked = True
        yield
        self._is_blocked = False

    @torch.no_grad()
    def exchange_gradients(self, replicas: list[Gradients], shares: list[float]) -> None:
        """Leave the sum over all replicas in the `grad` of every parameter. To be overridden.

        Args:
            replicas: The gradients of each of `local_replicas`, which may be edited: those of the
                window's batches, summed, times the share of its shard, and GradScaler's scale.
            shares: The mean of these shares, so that `replicas[i] / shares[i]` is the replica's
                own mean gradient.
        """
        if self.num_replicas > 1:
            replicas = [self.exchange_all(replicas, "gradients")[0]]
        self.set_sums(replicas[0])

    def route(self, bucket: Bucket, replicas: list[Gradients]) -> Route:
        """How a bucket's gradients become sums, one for each parameter. To be overridden.

        Args:
            bucket: Its `rows` are copies of the gradients.
            replicas: The gradients of each of `local_replicas`.
        """
        if self._dispatcher.in_place:
            return sum_in_place(bucket, self.allreduce, self.global_rank)
        make = sum_by_all if self._dispatcher.is_pair else sum_by_owners
        return make(bucket, self.allreduce, self.global_rank)

    def exchange_all(
        self, replicas: list[Gradients], purpose: str, **facts: int
    ) -> tuple[Gradients, bool]:
        """Start what has not started, meet once, and take what the routes return.

        Returns the results for parameters of which any replica has a gradient, and whether numbers
        were not finite, of which a route has told by `Bucket.has_spoiled`.
        """
        dispatcher = self._find_dispatcher()
        if any(g.layout != torch.strided for each in replicas for g in each.values()):
            raise MisconfigurationException("Sparse gradients: use nn.Embedding(sparse=False).")
        has_gradient = [any(p in each for each in replicas) for p in dispatcher.layout]
        trained = crc32(bytes(p.requires_grad for p in dispatcher.layout))
        # between GPUs, a process that fails before it meets would leave the others in a kernel
        waits = self.root_device.type != "cpu"
        while True:
            is_edited = dispatcher.has_sent_other(replicas)
            dispatcher.start_rest(replicas, self.route, waits)
            self._start_buffers(waits)
            spoiled = any(bucket.has_spoiled for bucket in dispatcher.buckets)
            bits = np.packbits([is_edited, spoiled, *has_gradient])
            rows = self.compare_facts(purpose, bits, (), parameters=trained, **facts)
            flags: Any = np.unpackbits(rows, axis=1, count=2 + len(has_gradient))
            found = flags.any(axis=0).tolist()
            if not found[0]:
                break
            dispatcher.restart()  # a hook has edited gradients that were on their way
        results = dispatcher.finish()
        if self._buffers:
            self.share_buffers(results[BUFFERS])
        sums = {p: X for b in dispatcher.buckets for p, X in zip(b.parameters, results[b])}
        present = {p: sums[p] for p, is_there in zip(dispatcher.layout, found[2:]) if is_there}
        return {p: X.clone() for p, X in present.items()}, found[1]

    def _find_dispatcher(self) -> Dispatcher:
        """A new one, if there are other parameters than in the update before."""
        layout = self.find_layout()
        if self._dispatcher is None or self._dispatcher.layout != layout:
            layout_sum = crc32(repr((*layout.values(),)).encode())
            self.compare_facts("new parameters", parameters=layout_sum)
            self._courier.kept.clear()
            in_place = self.sums_in_place and self._courier.in_memory
            args = layout, self.num_local, self._cap, self._courier, in_place
            self._dispatcher = Dispatcher(*args)
        return self._dispatcher

    def _start_in_pass(self, before: list[Gradients]) -> Any:
        """A context for the last backward pass of an update, in which buckets start."""
        dispatcher = self._dispatcher
        is_new = dispatcher is None or dispatcher.layout != self.find_layout()
        if is_new or self._is_blocked or not self._starts_in_pass:
            return nullcontext()
        if not dispatcher.has_messages or self.module.trainer.interrupted:
            return nullcontext()
        return dispatcher.within_pass(before, self.route)

    def teardown(self) -> None:
        if self._courier is not None and self._courier.group is not None:
            dist.destroy_process_group(self._courier.group)
        self._courier = self._dispatcher = None  # memory that a garbage collector would keep
        super().teardown()

    def set_sums(self, sums: Gradients) -> None:
        """Make sums the gradients of parameters, beside those of earlier backward passes."""
        earlier = self._window.earlier if self._window else None
        for p in self.module.parameters():
            before, total = (earlier or {}).get(p), sums.get(p)
            p.grad = total if before is None else before if total is None else before + total

    def find_layout(self) -> dict[Tensor, Any]:
        """Parameters that require a gradient, or did once, and what processes must find alike."""
        self._layout = {
            p: (name, p.dtype, p.shape, p.stride())
            for name, p in self.module.named_parameters()
            if p.requires_grad or p.grad is not None or p in self._layout
        }
        return self._layout

    def optimizer_step(self, optimizer: Any, closure: Any, *args: Any, **kwargs: Any) -> Any:
        loss_of_batch = closure
        if isinstance(optimizer, LBFGS) and not self.is_alone:  # it decides by the loss, too

            def loss_of_batch() -> Tensor:
                return self.reduce(closure() * self._my_share, reduce_op="sum")

        return super().optimizer_step(optimizer, loss_of_batch, *args, **kwargs)
