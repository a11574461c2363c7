"""The textbook's data parallelism as a Lightning Strategy (d2l.ai, 'Training on Multiple GPUs').

The functions of the chapter, and where they are here:

    get_params            every process makes the module and gets the first one's weights
    split_batch           the loader hands each process its part of the batch (loaders.py)
    train_batch
      losses of shards    `training_step`
      loss.backward()     `backward`
      allreduce           `exchange_gradients`; the rows that it sums are made in exchange.py
      sgd on each device  the optimizer of each process, called by Lightning
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal, cast

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
from lightning_mgpu.strategies.buffers import read_buffers, write_buffers
from lightning_mgpu.strategies.exchange import Exchange
from lightning_mgpu.strategies.loss import split_loss
from lightning_mgpu.strategies.processes import ProcessPerDeviceStrategy
from lightning_mgpu.strategies.split_batch import num_samples, split_batch

Gradients = dict[Tensor, Any]


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

    def prepare_gradient(self, name: str, replica: int, gradient: Tensor) -> None:
        """Override this to change a gradient in place, in its process, before the allreduce."""

    def setup(self, trainer: Trainer) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return super().setup(trainer)
        check_allreduce(self.allreduce, [self.root_device] * self.num_replicas)
        is_own = not self.module.automatic_optimization or is_overridden("backward", self.module)
        if self.num_local > 1 and (self._layer_sync or is_own):
            raise MisconfigurationException(
                "sync_batchnorm, manual optimization and a module's own `backward` need one "
                "replica per process: leave out `replicas`."
            )
        super().setup(trainer)
        self._seed = self.broadcast(torch.initial_seed())
        self._exchange: Exchange | None = None
        self._layout: list[Any] = []
        self._window: list[Gradients] = []  # by replica, while batches are accumulated
        self._window_weight, self._rescale = 0.0, 1.0
        self._is_blocked = self._is_counted = False
        self._exchanged: Gradients = {}

    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        outputs, buffers, start = [], [], read_buffers(self.module)
        self._shards = [batch] if self.num_local == 1 else split_batch(batch, self.num_local)
        self._wait = None
        if self._is_counted:  # the sizes travel while the step computes
            self._wait = self.start_numbers([0, *map(num_samples, self._shards)])
        for i, shard in enumerate(self._shards):
            if i > 0:
                write_buffers(self.module, start[None])
            replica = self.global_rank * self.num_local + i
            with self._run_as(replica, shard) if self.num_replicas > 1 else nullcontext():
                outputs.append(super().training_step(shard, *args, **kwargs))
            buffers.append(read_buffers(self.module))
        if self.num_replicas > 1 and len(start):
            write_buffers(self.module, self._gather_rows(torch.stack(buffers)))
        return self._weigh(outputs) if self.module.automatic_optimization else outputs[0]

    @contextmanager
    def _run_as(self, replica: int, shard: Any) -> Iterator[None]:
        """Random numbers by batch and replica: dropout draws the same in any process."""
        trainer = self.module.trainer
        # `self.log` weighs a mean by the samples that Lightning finds in here
        results, batch = trainer._results, trainer._results.batch
        results.batch, results.batch_size = shard, None
        with isolate_rng(include_cuda=self.root_device.type == "cuda"):
            seed_generators(self._seed, "step", trainer.fit_loop.total_batch_idx, replica)
            yield
        results.batch, results.batch_size = batch, None

    def _gather_rows(self, rows: Tensor) -> Tensor:
        """(k, n) bytes of all replicas, given (r, n) here."""
        if rows.is_cpu:
            return torch.from_numpy(self.start_gather(rows.numpy())()).view(self.num_replicas, -1)
        gathered = rows.repeat(self.world_size, 1)
        if not self.is_alone:
            dist.all_gather_into_tensor(gathered, rows)
        return gathered

    def _weigh(self, outputs: list[Any]) -> Any:
        """One loss for Lightning, in whose backward pass each shard counts by its share."""
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
            total = sum(self._shares) or 1.0
            mean = sum(loss.detach() * (s / total) for loss, s in zip(losses, self._shares))
            loss = self._leaf = mean.requires_grad_()
        return {**outputs[-1], "loss": loss} if isinstance(outputs[-1], Mapping) else loss

    def share_out(self, weights: Sequence[float | None]) -> list[float]:
        """The shares of the shards here, by their weights, or by their numbers of samples."""
        given = [weight for weight in weights if weight is not None]
        mine = given or [*map(num_samples, self._shards)]
        numbers = (self._wait or self.start_numbers([len(given), *mine]))()
        total = sum(all_weights := numbers[:, 1:].ravel().tolist())
        is_mixed = set(numbers[:, 0]) != {len(given)} or len(mine) < len(weights)
        if not 0 < total < np.inf or is_mixed or (0 in all_weights and self._layer_sync):
            what = "all need one, with a sum > 0; with sync_batchnorm each > 0"
            raise ValueError(f"The losses of a batch have weights {all_weights}: {what}.")
        self._is_counted = not given and self.num_replicas > 1  # next time, they go at once
        self._my_share, factor, self._rescale = sum(mine) / total, 1.0, 1.0
        if given:  # the gradient of a window is the weighted mean over its batches
            before = self._window_weight if self._window else 0.0
            self._window_weight = before + total
            self._rescale = before / self._window_weight
            factor = self.module.trainer.accumulate_grad_batches * (1 - self._rescale)
        return [weight / total * factor for weight in mine]

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        module, parameters = self.module, list(self.module.parameters())
        weight = kwargs.pop("weight", None)  # of `manual_backward`
        if not module.automatic_optimization:
            self._check_exchanged(parameters)
            if self.num_replicas > 1 or weight is not None:
                closure_loss = scale_gradient(closure_loss, *self.share_out([weight]))
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        if not self._window:
            self._earlier = get_gradients(parameters)  # the sums of earlier passes
            set_gradients(parameters, {})
            self._window = [{} for _ in range(self.num_local)]
        elif self._rescale != 1:
            self._window = [
                {p: g * self._rescale for p, g in each.items()} for each in self._window
            ]
            set_gradients(parameters, self._window[0])
        self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        if self.num_local == 1:
            self._window = [get_gradients(parameters)]
        else:  # Lightning's pass leaves the loss scale at the leaf; then a pass per replica
            for i, (loss, share) in enumerate(zip(self._losses, self._shares)):
                set_gradients(parameters, self._window[i])
                if share:
                    loss.backward(self._leaf.grad * share)
                self._window[i] = get_gradients(parameters)
            set_gradients(parameters, self._window[0])
        if not self._is_blocked:
            self.exchange_gradients(self._window)
            self._window = []
        return self.precision_plugin.post_backward(closure_loss, module)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning enters this for all batches of an accumulation window but the last."""
        self._is_blocked = True
        yield
        self._is_blocked = False

    def exchange_gradients(self, replicas: list[Gradients]) -> None:
        """Leave the sum over all replicas in the `grad` of every parameter."""
        exchange, names = self._find_exchange()
        parameters, prepare = exchange.parameters, cast(Callable, self.prepare_gradient)
        for i, gradients in enumerate(replicas):
            if any(gradient.layout != torch.strided for gradient in gradients.values()):
                raise MisconfigurationException("Sparse gradients: use nn.Embedding(sparse=False).")
            exchange.write(i, [gradients.get(p) for p in parameters])
            replica = self.global_rank * self.num_local + i
            for name, p, row in zip(names, parameters, exchange.local_rows[i]):
                if p in gradients and prepare(name, replica, row) is not None:
                    raise TypeError("`prepare_gradient` returned a value: change it in place.")
        set_gradients(list(self._earlier), self._earlier)
        for p, total in zip(parameters, exchange.sum()):
            earlier = self._earlier.get(p)
            p.grad = total if earlier is None else earlier if total is None else earlier + total
            self._exchanged[p] = None if self.module.automatic_optimization else p.grad

    def _find_exchange(self) -> tuple[Exchange, Sequence[str]]:
        """The rows of all parameters that require a gradient, or did once, and their names."""
        known = set(map(id, self._exchange.parameters)) if self._exchange else set()
        named = self.module.named_parameters()
        used = [(n, p) for n, p in named if p.requires_grad or p.grad is not None or id(p) in known]
        names, parameters = zip(*used)
        layout = [(id(p), p.dtype, p.shape, p.stride()) for p in parameters]
        if self._exchange is None or layout != self._layout:
            self._layout, self._exchange = layout, Exchange(self, parameters)
        return self._exchange, names

    def optimizer_step(self, optimizer: Any, closure: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.module.automatic_optimization:
            self._check_exchanged([p for group in optimizer.param_groups for p in group["params"]])
        loss_of_batch = closure
        if isinstance(optimizer, LBFGS) and not self.is_alone:  # it decides by the loss, too

            def loss_of_batch() -> Tensor:
                return self.reduce(closure() * self._my_share, reduce_op="sum")

        return super().optimizer_step(optimizer, loss_of_batch, *args, **kwargs)

    def _check_exchanged(self, parameters: list[Tensor]) -> None:
        """Refuse gradients in manual optimization that are not those of `exchange_gradients`."""
        is_own = [p.grad is None or p.grad is self._exchanged.get(p) for p in parameters]
        if not all(is_own) and not self.is_alone:
            raise MisconfigurationException(
                "A gradient was never exchanged: call `self.manual_backward(loss)` instead of "
                "`loss.backward()`, and edit gradients in place."
            )


def scale_gradient(loss: Tensor, share: float) -> Tensor:
    """The loss, whose gradient counts by a share. With share 0 there is none, not even NaN."""
    if share == 0:
        return torch.zeros_like(loss, requires_grad=True)
    loss = loss.view_as(loss)
    if loss.requires_grad:
        loss.register_hook(lambda gradient: gradient * share)
    return loss


def get_gradients(parameters: list[Tensor]) -> Gradients:
    return {p: p.grad for p in parameters if p.grad is not None}


def set_gradients(parameters: list[Tensor], gradients: Gradients) -> None:
    for p in parameters:
        p.grad = gradients.get(p)
