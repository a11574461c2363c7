"""The textbook's data parallelism as a Lightning Strategy (d2l.ai, 'Training on Multiple GPUs').

README.md names the place of each function of the chapter; `__init__.py` has the way of a batch.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from torch.optim import LBFGS

from lightning_mgpu.allreduce import check_allreduce, textbook_allreduce
from lightning_mgpu.seeds import seed_generators
from lightning_mgpu.shards import Shards, checksum
from lightning_mgpu.strategies.buffers import read_buffers, statistics, write_buffers
from lightning_mgpu.strategies.exchange import Exchange
from lightning_mgpu.strategies.loss import scale_gradient, split_loss
from lightning_mgpu.strategies.processes import ProcessPerDeviceStrategy
from lightning_mgpu.strategies.split_batch import num_samples
from lightning_mgpu.strategies.window import Gradients, Window, get_gradients, set_gradients


class ManualAllreduceStrategy(ProcessPerDeviceStrategy):
    """k replicas of the module, a process per device, equal by a hand-written allreduce.

    Args:
        allreduce: Leaves the sum of k tensors, one per replica, in each of them (see
            `lightning_mgpu.allreduce`). On the command line: its dotted path.
        replicas: k, a multiple of the number of processes. A process runs its replicas one after
            the other with one set of weights. The bits of the trained weights depend on k, and not
            on the number of devices of one kind. Left out: one per device.
        parallel_devices, process_group_backend, timeout, start_method: As for DDPStrategy.

    Raises:
        ValueError: When `fit` begins, if `allreduce` does not compute the sum in place.
    """

    def __init__(
        self,
        allreduce: Callable[[list[Tensor]], None] = textbook_allreduce,
        replicas: int | None = None,
        parallel_devices: list[str] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=5),
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
    ) -> None:
        if not callable(allreduce) or (replicas is not None and replicas < 1):
            raise ValueError(f"{allreduce=}, {replicas=}: needed are a function, and a count >= 1")
        super().__init__(
            parallel_devices=[torch.device(each) for each in parallel_devices or ()] or None,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self.allreduce, self.replicas = allreduce, replicas

    def setup(self, trainer: Trainer) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return super().setup(trainer)
        check_allreduce(self.allreduce, [self.root_device] * self.num_replicas)
        is_own = not self.module.automatic_optimization or is_overridden("backward", self.module)
        hook = "on_before_batch_transfer"
        hooks: Any = trainer._data_connector._datahook_selector
        is_own = is_own or is_overridden(hook, hooks.get_instance(hook))
        if self.num_local > 1 and (self._layer_sync or is_own):
            raise MisconfigurationException(
                "sync_batchnorm, manual optimization, `on_before_batch_transfer` and a module's "
                "own `backward` need one replica per process: leave out `replicas`."
            )
        super().setup(trainer)
        self._seed = self.broadcast(torch.initial_seed())
        self._exchange: Exchange | None = None
        self._layout: dict[Tensor, Any] = {}  # of the parameters of the exchange
        self._window: Window | None = None
        self.is_in_step = False
        self._is_blocked = False

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
            self.compare_weights()  # after the first update, and later before each checkpoint

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._shards, outputs = shards_of(batch), []
        if len(self._shards) != self.num_local:
            raise MisconfigurationException("Several training loaders: leave out `replicas`.")
        if self.num_replicas == 1:
            return self._weigh([super().training_step(batch, *args, **kwargs)])
        before = self._look_at_weights()
        start, buffers = read_buffers(self.module), []
        for i, shard in enumerate(self._shards):
            if i > 0:
                write_buffers(self.module, start[None])
            with self._log_as(shard), self._random_numbers_of(i, "step"):
                outputs.append(super().training_step(shard, *args, **kwargs))
            buffers.append(read_buffers(self.module, len(start)))
            if i == 0 and self._look_at_weights() != before:
                raise MisconfigurationException(
                    "`training_step` edits weights, which several replicas of one process have in "
                    "common: leave out `replicas`, or edit in `on_train_batch_end`."
                )
        self.share_buffers(torch.stack(buffers))
        self._statistics = [each.clone() for each in statistics(self.module)]
        return self._weigh(outputs)

    def _look_at_weights(self) -> Any:
        """Another value after an edit. A checksum waits for the device, but sees `.data`, too."""
        weights = [*self.module.parameters()] if self.num_local > 1 else []
        is_checked = self.module.trainer.fit_loop.total_batch_idx in (0, 3)
        return [p._version for p in weights], checksum(weights) if is_checked else 0

    @contextmanager
    def _random_numbers_of(self, i: int, purpose: str) -> Iterator[None]:
        """Random numbers by batch and replica: dropout draws the same in any process."""
        with isolate_rng(include_cuda=self.root_device.type == "cuda"):
            batch_idx = self.module.trainer.fit_loop.total_batch_idx + 1  # -1 at the first transfer
            replica = self.global_rank * self.num_local + i
            seed_generators(self._seed, purpose, batch_idx, replica)
            yield

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

    def share_buffers(self, rows: Tensor) -> None:
        """Set the buffers by those of all replicas, given (r, bytes) of the replicas here."""
        if rows.numel():
            write_buffers(self.module, self.gather_rows(rows))

    def gather_rows(self, rows: Tensor) -> Tensor:
        """From the rows (r, n) of the replicas here to those of all, (k, n)."""
        if rows.is_cpu:
            gathered = torch.from_numpy(self.gather(rows.numpy()))
        else:
            gathered = rows.repeat(self.world_size, 1)
            if not self.is_alone:
                dist.all_gather_into_tensor(gathered, rows)
        return gathered.view(-1, rows.shape[1])

    def on_validation_end(self) -> None:
        super().on_validation_end()
        if self.module.trainer.state.fn == TrainerFn.FITTING and not self.is_alone:
            self.share_buffers(read_buffers(self.module)[None])

    def _weigh(self, outputs: list[Any]) -> Any:
        """One loss for Lightning, in whose backward pass each shard counts by its share."""
        if not self.module.automatic_optimization:
            return outputs[0]
        losses, weights = zip(*map(split_loss, outputs))
        if self.num_replicas == 1 and weights[0] is None:
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
        """The shares of the shards here, by their weights, or by their numbers of samples."""
        window, has_weights = self._open_window(), weights[0] is not None
        window.kinds |= {weight is not None for weight in weights}
        mine = [weight or 0.0 for weight in weights] if has_weights else self._count_samples()
        kind = has_weights if len(window.kinds) == 1 else np.inf
        numbers = self.compare_facts([kind, *mine], parameters=self._find_parameters())
        kinds, all_weights = numbers[:, 0], numbers[:, 1:].ravel().tolist()
        total, lacks_one = sum(all_weights), 0 in all_weights and self._layer_sync
        if not np.isfinite([total, *kinds]).all() or len({*kinds}) > 1 or lacks_one:
            what = "all of an update need one, or none; with sync_batchnorm each > 0"
            raise ValueError(f"The losses of a batch have weights {all_weights}: {what}.")
        factor = window.add_weight(total) if has_weights else 1.0
        self._my_share = sum(mine) / total if total else 0.0
        return [weight / total * factor if total else 0.0 for weight in mine]

    def _count_samples(self) -> list[float]:
        if not all(getattr(each, "is_counted", True) for each in self.passes()):
            raise ValueError(
                "The shape of a batch does not tell how many samples are in it, so that its loss "
                'needs a weight: return {"loss": loss, "weight": n}.'
            )
        return [*map(num_samples, self._shards)]

    def _open_window(self) -> Window:
        trainer = self.module.trainer
        if self._window is None or self._window.epoch != trainer.current_epoch:
            num_batches = trainer.accumulate_grad_batches
            self._window = Window(self.num_local, num_batches, trainer.current_epoch)
        return self._window

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        module, parameters = self.module, list(self.module.parameters())
        weight = kwargs.pop("weight", None)  # of `manual_backward`
        if not module.automatic_optimization and (self.num_replicas > 1 or weight is not None):
            closure_loss = scale_gradient(closure_loss, *self.share_out([weight]))
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        window = self._open_window()
        window.open(parameters)
        self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        if self.num_local == 1:
            window.keep([get_gradients(parameters)])
        else:
            window.keep(self._run_local_passes(window.gradients, parameters))
        if self.num_replicas > 1 and module.automatic_optimization:
            # activation checkpointing has run the layers a second time
            for buffer, value in zip(statistics(module), self._statistics):
                buffer.copy_(value)
        if not self._is_blocked:
            self.exchange_gradients(window.gradients)
            self._window = None
        return self.precision_plugin.post_backward(closure_loss, module)

    def _run_local_passes(
        self, gradients: list[Gradients], parameters: list[Tensor]
    ) -> list[Gradients]:
        """A backward pass per replica. Lightning's own has left its loss scale at the leaf."""
        for i, (loss, share) in enumerate(zip(self._losses, self._shares)):
            set_gradients(parameters, gradients[i])
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
    def exchange_gradients(self, replicas: list[Gradients]) -> None:
        """Leave the sum over all replicas in the `grad` of every parameter.

        Args:
            replicas: The gradients of each replica here, times the share of its shard.
        """
        if self.num_replicas == 1:
            return self.set_sums(replicas[0])
        if self._exchange is None:
            self._exchange = Exchange(self, [*self._layout])
        parameters = self._exchange.parameters
        for i, gradients in enumerate(replicas):
            if any(gradient.layout != torch.strided for gradient in gradients.values()):
                raise MisconfigurationException("Sparse gradients: use nn.Embedding(sparse=False).")
            self._exchange.write(i, [gradients.get(p) for p in parameters])
        sums = zip(parameters, self._exchange.sum())
        self.set_sums({p: row.clone() for p, row in sums if row is not None})

    def set_sums(self, sums: Gradients) -> None:
        """Make sums the gradients of parameters, beside those of earlier backward passes."""
        earlier = self._window.earlier if self._window else None
        for p in self.module.parameters():
            before, total = (earlier or {}).get(p), sums.get(p)
            p.grad = total if before is None else before if total is None else before + total

    def _find_parameters(self) -> int:
        """Find what is exchanged: parameters that require a gradient, or did once. Its checksum."""
        layout = {
            p: (name, p.dtype, p.shape, p.stride())
            for name, p in self.module.named_parameters()
            if p.requires_grad or p.grad is not None or p in self._layout
        }
        if layout != self._layout:
            self._layout, self._exchange = layout, None
        return crc32(repr((layout.values(), self._exchange is None)).encode())

    def optimizer_step(self, optimizer: Any, closure: Any, *args: Any, **kwargs: Any) -> Any:
        loss_of_batch = closure
        if isinstance(optimizer, LBFGS) and not self.is_alone:  # it decides by the loss, too

            def loss_of_batch() -> Tensor:
                return self.reduce(closure() * self._my_share, reduce_op="sum")

        return super().optimizer_step(optimizer, loss_of_batch, *args, **kwargs)


def shards_of(batch: Any) -> Sequence[Any]:
    return batch.shards if isinstance(batch, Shards) else [batch]
