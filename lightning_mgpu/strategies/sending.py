"""Gradients leave in buckets, within the backward pass where they can, and come back as sums."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_mgpu.processes import ProcessPerDeviceStrategy
from lightning_mgpu.processes.ends import drop_group
from lightning_mgpu.routes.buckets import Bucket, Gradients
from lightning_mgpu.routes.courier import Courier
from lightning_mgpu.routes.dispatcher import Dispatcher
from lightning_mgpu.routes.sums import Route, sum_by_all, sum_by_owners, sum_in_place, take_all
from lightning_mgpu.strategies.buffers import ReplicaBuffers, write_buffers

BUFFERS = "buffers"  # the key of their route
BUCKET_CAP_MB = 4.0


class GradientSender(ProcessPerDeviceStrategy):
    """Sends all gradients of an update along `route`, with one meeting."""

    allreduce: Callable[[list[Tensor]], None]
    bucket_cap_mb: float | None
    sums_in_place = True  # where processes have memory in common; not if `route` sends messages
    _courier: Any = None
    _dispatcher: Any = None
    _is_blocked = False  # in all batches of a window but the last

    def set_up_courier(self, waits_for_pass: bool) -> None:
        """One courier per fit: one that is kept would hand a failed fit's messages to the next."""
        is_on_cpu = self.root_device.type == "cpu"
        # between GPUs messages leave after the meeting: a process that fails before it would leave
        # the others in a kernel
        self._waits = not is_on_cpu
        self._layout: dict[Tensor, Any] = {}
        self._dispatcher, self._is_blocked = None, False
        timeout = timedelta(seconds=2 * self.meeting.timeout)
        group = None if self.is_alone else dist.new_group(timeout=timeout)
        self._courier = Courier(self.meeting, group)
        self._has_memory = self.sums_in_place and bool(self.meeting.cells) and is_on_cpu
        default = BUCKET_CAP_MB if is_on_cpu else 0
        self._cap = 1e6 * (default if self.bucket_cap_mb is None else self.bucket_cap_mb)
        # of two NCCL groups, only one may send at a time
        waits_for_pass |= self._layer_sync is not None and not is_on_cpu
        self._starts_in_pass = self._cap > 0 and not waits_for_pass

    def route(self, bucket: Bucket, replicas: list[Gradients]) -> Route:
        """How a bucket's gradients become sums, one for each parameter. It may be overridden.

        Args:
            bucket: Its `rows` are copies of the gradients.
            replicas: The gradients of each of `local_replicas`.
        """
        if self._dispatcher.in_place:
            return sum_in_place(bucket, self.allreduce, self.global_rank)
        make = sum_by_all if self._dispatcher.is_pair else sum_by_owners
        return make(bucket, self.allreduce, self.global_rank)

    def exchange_all(
        self, replicas: list[Gradients], purpose: str, buffers: Any = None, **facts: int
    ) -> Gradients:
        """Start what has not started, meet, and take what the routes return.

        With `ReplicaBuffers`, the buffers of all replicas are shared, too.

        Returns the results for parameters of which any replica has a gradient.
        """
        with self.meeting.span("sums"):
            while True:
                row = self.start_all(replicas, buffers, **facts)
                flags = self.read_flags(self.meeting.gather(row, purpose))
                if not flags[0]:
                    return self.take_results(self._dispatcher.finish(replicas[0]), flags)
                self._dispatcher.finish({})  # a hook has edited gradients on their way

    def start_all(self, replicas: list[Gradients], buffers: Any = None, **facts: int) -> np.ndarray:
        """Start what has not started. Returns the row that this process brings to the meeting."""
        dispatcher = self._renew_dispatcher()
        if any(g.layout != torch.strided for each in replicas for g in each.values()):
            raise MisconfigurationException("Sparse gradients: use nn.Embedding(sparse=False).")
        is_edited = dispatcher.has_sent_other(replicas)
        dispatcher.start_rest(replicas, self.route, self._waits)
        if buffers:
            self._start_buffers(buffers)
        spoiled = any(bucket.has_spoiled for bucket in dispatcher.buckets)
        has_gradient = [any(p in each for each in replicas) for p in dispatcher.layout]
        trained = crc32(bytes(p.requires_grad for p in dispatcher.layout))
        beside = np.packbits([is_edited, spoiled, *has_gradient])
        return self.facts_to_row(beside, (), parameters=trained, **facts)

    def _start_buffers(self, buffers: ReplicaBuffers) -> None:
        """After the meeting: gloo would abort a process that is at another place."""
        route = take_all(buffers.to_row(), self.world_size)
        self._courier.start(BUFFERS, route, waits=True)

    def read_flags(self, rows: np.ndarray) -> list[int]:
        """Of the rows of all processes: is any edited, is any spoiled, who has a gradient.

        A route tells by `Bucket.has_spoiled` that it got numbers that are not finite.
        """
        count = 2 + len(self._dispatcher.layout)
        flags: Any = np.unpackbits(self.check_facts(rows), axis=1, count=count)
        return flags.any(axis=0).tolist()

    def take_results(self, results: dict[Any, Any], flags: list[int]) -> Gradients:
        """What `exchange_all` returns, from the results of routes."""
        _, _, *has_gradient = flags
        if BUFFERS in results:
            write_buffers(self.module, results[BUFFERS].view(self.num_replicas, -1))
        buckets = self._dispatcher.buckets
        sums = {p: X for bucket in buckets for p, X in zip(bucket.parameters, results[bucket])}
        present = zip(self._dispatcher.layout, has_gradient)
        return {p: sums[p] for p, is_there in present if is_there}

    def _renew_dispatcher(self) -> Dispatcher:
        """A new one, if there are other parameters than in the update before."""
        layout = self.find_layout()
        if self._dispatcher is None or self._dispatcher.layout != layout:
            if self._dispatcher is not None and self._dispatcher.num_started:
                raise RuntimeError("A hook of a backward pass may not change `requires_grad`.")
            layout_sum = crc32(repr((*layout.values(),)).encode())
            self.compare_facts("new parameters", parameters=layout_sum)
            self._courier.kept.clear()
            args = layout, self.num_local, self._cap, self._courier, self._has_memory
            self._dispatcher = Dispatcher(*args)
        return self._dispatcher

    def _starting_buckets(self, before: list[Gradients]) -> Any:
        """A context for the last backward pass of an update, in which buckets start.

        None starts in the first update, nor in another one with a new layout of parameters.
        """
        dispatcher = self._dispatcher
        if dispatcher is None or not dispatcher.has_messages or not self._starts_in_pass:
            return nullcontext()
        is_new = dispatcher.layout != self.find_layout()
        if is_new or self._is_blocked or self.module.trainer.interrupted:
            return nullcontext()
        return dispatcher.within_pass(before, self.route)

    def find_layout(self) -> dict[Tensor, Any]:
        """Parameters that require a gradient, or did once, and what processes must find alike."""
        self._layout = {
            p: (name, p.dtype, p.shape, p.stride())
            for name, p in self.module.named_parameters()
            if p.requires_grad or p.grad is not None or p in self._layout
        }
        return self._layout

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Lightning enters this for all batches of an accumulation window but the last."""
        self._is_blocked = True
        try:
            yield
        finally:
            self._is_blocked = False

    def teardown(self) -> None:
        if self._courier is not None:
            drop_group(self._courier.group, self.module.trainer.interrupted)
        self._courier = self._dispatcher = None  # memory that a garbage collector would keep
        super().teardown()
