"""The textbook's data parallelism as a Lightning Strategy (d2l.ai, 'Training on Multiple GPUs').

The chapter's functions, and where they are here:

    get_params      every process makes the module, and gets the first one's weights (processes.py)
    split_batch     a loader hands each process its shards (loaders.py); a process with several
                    replicas cuts them apart (`training_step`)
    train_batch     losses                  `training_step`
                    loss.backward()         `backward`
                    allreduce(gradients)    `_exchange_gradients`; the rows it gets: exchange.py
                    sgd, on every device    the optimizer of each process: Lightning's step

    python -m lightning_mgpu fit --trainer.devices=2 --trainer.strategy=manual_allreduce
    python -m lightning_mgpu fit --trainer.devices=2 --trainer.strategy=manual_allreduce \\
        --trainer.strategy.allreduce=my_module.my_allreduce --trainer.strategy.replicas=4
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_mgpu.allreduce import Allreduce, check_allreduce, textbook_allreduce
from lightning_mgpu.seeds import seed_generators
from lightning_mgpu.strategies.buffers import read_buffers, write_buffers
from lightning_mgpu.strategies.exchange import Exchange, MessageExchange, num_bytes
from lightning_mgpu.strategies.loss import split_loss
from lightning_mgpu.strategies.meeting import ELSEWHERE, SharedMeeting, share_memory
from lightning_mgpu.strategies.processes import ProcessPerDeviceStrategy, StartMethod
from lightning_mgpu.strategies.split_batch import num_samples, split_batch

Gradients = dict[nn.Parameter, Tensor]


class ManualAllreduceStrategy(ProcessPerDeviceStrategy):
    """k replicas of the module, equal by a hand-written allreduce; a process per device.

    Args:
        allreduce: Leaves the sum of k tensors, one per replica, in each of them (see
            `lightning_mgpu.allreduce`). A function of your own goes here, on the command line by
            its dotted path; it is tried on small tensors first.
        replicas: k, a multiple of the number of processes. A process runs its replicas one after
            the other, with one set of weights. The trained weights are the same bits on any number
            of devices of one kind. Left out: one per device.
        parallel_devices: The devices of this machine, for example `["cuda:0", "cuda:1"]`. Left
            out: those of `Trainer(accelerator, devices)`.
        process_group_backend: As DDPStrategy's: `nccl` on GPUs, `gloo` elsewhere.
        timeout: How long a process waits for another one.
        start_method: As DDPStrategy's.

    Raises:
        ValueError: If `allreduce` does not compute the sum in place, with what each replica got.
        MisconfigurationException: If an option does not fit the devices or the module.
    """

    def __init__(
        self,
        allreduce: Callable[[list[Tensor]], None] = textbook_allreduce,
        replicas: int | None = None,
        parallel_devices: list[str] | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta = timedelta(minutes=5),
        start_method: StartMethod = "popen",
    ) -> None:
        super().__init__(replicas, parallel_devices, process_group_backend, timeout, start_method)
        if not callable(allreduce):
            raise ValueError(f"allreduce={allreduce}: give a function of a list of tensors.")
        self.allreduce: Allreduce = allreduce

    def prepare_gradient(self, name: str, replica: int, gradient: Tensor) -> None:
        """Override this to change a replica's gradient in place before the allreduce.

        It runs in the replica's process. A state, for example of error feedback, is kept by (name,
        replica).
        """

    @override
    def setup(self, trainer: Trainer) -> None:
        module, is_fitting = self.lightning_module, trainer.state.fn == TrainerFn.FITTING
        if is_fitting:
            check_allreduce(self.allreduce, [self.root_device] * self.num_replicas)
            self._refuse("sync_batchnorm", self._layer_sync is not None)
            self._refuse("manual optimization", not module.automatic_optimization)
            self._refuse("an overridden `backward`", is_overridden("backward", module))
        super().setup(trainer)
        if is_fitting:
            self.seed = self.broadcast(torch.initial_seed())
            self.exchange: Exchange | None = None
            self.window: list[Gradients] | None = None  # of each replica, while one is open
            self.kept: Gradients = {}
            self.is_blocked, self.is_in_backward = False, False
            self.window_weight, self.never_exchanged = 0.0, set()
            size = max(read_buffers(module).numel(), 8 * len(list(module.parameters())))
            self.meeting = self.meet(2 * self.num_local * size + 2**16)
            if not module.automatic_optimization:
                self._watch_backward_calls()

    def _refuse(self, what: str, is_asked_for: bool) -> None:
        if is_asked_for and self.num_local > 1:
            raise MisconfigurationException(
                f"{what} needs one replica per process, but there are {self.num_replicas} on "
                f"{self.num_world}: leave out `replicas`, or use more devices."
            )

    # --- my shards, and the loss of each

    @override
    def training_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        module, self.batch, outputs, buffers = self.lightning_module, batch, [], []
        self.shards = self._split(batch) if self.num_local > 1 else [batch]
        start = read_buffers(module)
        for i, shard in enumerate(self.shards):
            if i > 0:
                write_buffers(module, start[None])
            with self._random_numbers(self.first_replica + i, shard):
                outputs.append(super().training_step(shard, *args, **kwargs))
            buffers.append(read_buffers(module))
        if self.num_replicas > 1 and len(start):
            write_buffers(module, self._gather_buffers(torch.stack(buffers)))
        return self._weigh(outputs) if module.automatic_optimization else outputs[0]

    def _split(self, batch: Any) -> list[Any]:
        if self.num_world == 1:
            self.check_num_samples(num_samples(batch))
        return split_batch(batch, self.num_local)

    @contextmanager
    def _random_numbers(self, replica: int, shard: Any) -> Iterator[None]:
        """A stream for each replica and batch: dropout draws the same in any process."""
        if self.num_replicas == 1:
            yield
            return
        trainer = self.lightning_module.trainer
        # `self.log` weighs a mean by the samples that Lightning finds in here
        trainer._results.batch, trainer._results.batch_size = shard, None
        with isolate_rng(include_cuda=self.root_device.type == "cuda"):
            seed_generators(self.seed, "step", trainer.fit_loop.total_batch_idx, replica)
            yield

    def _gather_buffers(self, rows: Tensor) -> Tensor:
        """(k, bytes): the buffers of all replicas, given those of this process."""
        if self.num_world == 1:
            return rows
        if rows.is_cpu:
            gathered = torch.from_numpy(self.meeting.gather(rows.numpy().reshape(-1)))
        else:
            gathered = rows.new_empty(self.num_replicas, rows.shape[1])
            dist.all_gather_into_tensor(gathered, rows)
        return gathered.view(self.num_replicas, -1)

    def _weigh(self, outputs: list[Any]) -> Any:
        """Give Lightning one loss; the backward pass of each shard counts by its share."""
        losses, weights, _ = zip(*map(split_loss, outputs))
        if self.num_replicas == 1 and weights == (None,):
            return outputs[0]
        if any(loss is None for loss in losses):
            raise MisconfigurationException(
                "`training_step` returned None: every shard of a batch needs a loss. To leave one "
                'out of the mean, return {"loss": loss, "weight": 0}.'
            )
        shares = self._share_out(weights)
        if self.num_local == 1:
            loss = scale_gradient(losses[0], shares[0])
        else:
            self.losses, self.shares = losses, shares
            total = sum(shares) or 1.0
            mean = sum(loss.detach() * (share / total) for loss, share in zip(losses, shares))
            loss = self.leaf = mean.requires_grad_()
        return {**outputs[-1], "loss": loss} if isinstance(outputs[-1], Mapping) else loss

    def _share_out(self, weights: Sequence[float | None]) -> list[float]:
        """The share of each shard here of the global batch.

        Processes tell each other how many samples they have, or what a step gave as its weight,
        and which batches their loaders have drawn so far.
        """
        is_given = weights[0] is not None
        mine = weights if is_given else [num_samples(shard) for shard in self.shards]
        numbers = self.gather_numbers([self.order_checksum(), is_given, *mine])
        orders, given, all_weights = numbers[:, 0], numbers[:, 1], numbers[:, 2:].reshape(-1)
        if len(different := np.flatnonzero(orders != orders[0])):
            raise RuntimeError(
                f"{ELSEWHERE}: the loader of process {different[0]} draws other batches than that "
                "of process 0. Seed all alike, and do not split a dataset by rank: the strategy "
                "gives each process its part of every batch."
            )
        total = sum(all_weights.tolist())
        if np.isnan(total) or not 0 < total < np.inf or len(set(given)) > 1:
            raise ValueError(
                f"The weights of a batch's shards are {all_weights.tolist()}: all of its losses "
                "need one, and their sum must be positive."
            )
        if 0 in all_weights and self._layer_sync is not None:
            raise MisconfigurationException("sync_batchnorm needs a positive weight of every loss")
        self.share = sum(mine) / total
        self.rescale, factor = 1.0, 1.0
        if is_given:  # the window's gradient is a mean over the weights of all its batches
            before = 0.0 if self.window is None else self.window_weight
            self.window_weight, self.rescale = before + total, before / (before + total)
            factor = self.lightning_module.trainer.accumulate_grad_batches * (1 - self.rescale)
        return [weight / total * factor for weight in mine]

    # --- my gradients

    @override
    def backward(
        self,
        closure_loss: Tensor,
        optimizer: Optimizer | None,
        *args: Any,
        weight: float | None = None,
        **kwargs: Any,
    ) -> Tensor:
        module = self.lightning_module
        if not module.automatic_optimization and (self.num_replicas > 1 or weight is not None):
            closure_loss = scale_gradient(closure_loss, *self._share_out([weight]))
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        parameters = list(module.parameters())
        if self.window is None:
            # gradients of an earlier pass: exchanged already, and maybe rows, which are reused
            self.kept = {p: p.grad.clone() for p in parameters if p.grad is not None}
            set_gradients(parameters, {})
            self.window = [{} for _ in range(self.num_local)]
        elif self.rescale != 1:
            self.window = [{p: g * self.rescale for p, g in each.items()} for each in self.window]
            set_gradients(parameters, self.window[0])
        self.is_in_backward = True
        self.precision_plugin.backward(closure_loss, module, optimizer, *args, **kwargs)
        if self.num_local == 1:
            self.window = [get_gradients(parameters)]
        else:
            self._backward_of_replicas(parameters)
        self.is_in_backward = False
        if not self.is_blocked:
            self._exchange_gradients(self.window)
            self.window = None
        return self.precision_plugin.post_backward(closure_loss, module)

    def _backward_of_replicas(self, parameters: list[nn.Parameter]) -> None:
        """One pass per replica. Lightning's own has left the factor of all losses at the leaf."""
        for i, (loss, share) in enumerate(zip(self.losses, self.shares)):
            set_gradients(parameters, self.window[i])
            if share:
                torch.autograd.backward(loss, self.leaf.grad * share)
            self.window[i] = get_gradients(parameters)
        set_gradients(parameters, self.window[0])

    @contextmanager
    @override
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning's, around all batches of an accumulation window but the last."""
        self.is_blocked = True
        try:
            yield
        finally:
            self.is_blocked = False

    # --- the allreduce

    def _exchange_gradients(self, replicas: list[Gradients]) -> None:
        """Leave the sum over all replicas in every parameter's `grad`."""
        names, exchange = self._find_exchange()
        for i, gradients in enumerate(replicas):
            exchange.write(i, [gradients.get(p) for p in exchange.parameters])
            for name, p, row in zip(names, exchange.parameters, exchange.local_rows[i]):
                if p in gradients:
                    self.prepare_gradient(name, self.first_replica + i, row)
        for p, total in zip(exchange.parameters, exchange.sum()):
            kept = self.kept.get(p)
            p.grad = total if kept is None else kept if total is None else kept + total

    def _find_exchange(self) -> tuple[list[str], Exchange]:
        """Rows for every parameter that requires a gradient, or did once, with their names."""
        known = set() if self.exchange is None else set(map(id, self.exchange.parameters))
        named = self.lightning_module.named_parameters()
        names, parameters = zip(*((n, p) for n, p in named if p.requires_grad or id(p) in known))
        layout = [(id(p), p.dtype, p.shape, p.stride()) for p in parameters]
        if self.exchange is None or layout != self.layout:
            self.layout, memory = layout, None
            size = self.num_replicas * num_bytes(parameters)
            where = self.num_local, self.global_rank, self.num_world
            arguments = parameters, self.allreduce, self.meeting, *where
            if self.num_world == 1:
                memory = torch.empty(size, dtype=torch.uint8, device=self.root_device)
            elif isinstance(self.meeting, SharedMeeting):
                memory = share_memory(size, self.is_global_zero, self.broadcast)
            self.exchange = (
                MessageExchange(*arguments) if memory is None else Exchange(*arguments, memory)
            )
        return names, self.exchange

    # --- my update

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        if any(p in self.never_exchanged and p.grad is not None for p in parameters_of(optimizer)):
            raise MisconfigurationException(
                "An optimizer steps with gradients that were never exchanged: call "
                "`self.manual_backward(loss)` instead of `loss.backward()`."
            )
        if isinstance(optimizer, LBFGS) and self.num_world > 1:
            local_closure = closure

            def closure() -> Tensor:  # LBFGS decides by the value: the same in every process
                return self.reduce(local_closure() * self.share, reduce_op="sum")

        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def _watch_backward_calls(self) -> None:
        """Note which parameters get a gradient outside of `backward`."""

        def note(parameter: Tensor) -> None:
            if not self.is_in_backward:
                self.never_exchanged.add(parameter)

        if self.num_world > 1:
            for parameter in self.lightning_module.parameters():
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(note)


def scale_gradient(loss: Tensor, share: float) -> Tensor:
    """The loss, whose gradient is multiplied by a share. With share 0 it has none, not even NaN."""
    if share == 0:
        return torch.zeros_like(loss, requires_grad=True)
    loss = loss.view_as(loss)
    if loss.requires_grad:
        loss.register_hook(lambda gradient: gradient * share)
    return loss


def get_gradients(parameters: list[nn.Parameter]) -> Gradients:
    return {p: p.grad for p in parameters if p.grad is not None}


def set_gradients(parameters: list[nn.Parameter], gradients: Gradients) -> None:
    for p in parameters:
        p.grad = gradients.get(p)


def parameters_of(optimizer: Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])
