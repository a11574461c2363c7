"""Starts the buckets of a model in order, during the backward pass, like DDP's Reducer."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_mgpu.distributed.comm.buckets import Bucket, Gradients, group_parameters, padded_size
from lightning_mgpu.distributed.comm.schedules import MessageSchedule
from lightning_mgpu.distributed.comm.transport import Transport

SyncBucket = Callable[[Bucket, Gradients], MessageSchedule]


class BucketReducer:
    """The buckets of a parameter layout; plays the role of DDP's Reducer.

    Args:
        layout: Non-empty parameters, in the order of the module.
        cap: Bucket size in bytes; 0 means one bucket per dtype.
        transport: Sends and receives the messages.
        sync_bucket: Returns the message schedule of a bucket, from all gradients that are ready.
        is_elementwise: Whether the allreduce may be called on slices of a bucket.
        in_memory: Whether processes sum rows in place, in shared memory.
    """

    def __init__(
        self,
        layout: dict[Tensor, Any],
        cap: float,
        transport: Transport,
        sync_bucket: SyncBucket,
        is_elementwise: bool,
        in_memory: bool,
    ) -> None:
        self.layout, self.transport, self.sync_bucket = layout, transport, sync_bucket
        self.num_started = self.num_early = 0
        size, rank = transport.control.size, transport.control.rank
        num_bytes, memory, rows, begin = sum(map(padded_size, layout)), None, None, 0
        if in_memory and size > 1 and num_bytes:
            memory = transport.control.map_memory(size * num_bytes)
        self.sends_messages = size > 1 and memory is None
        self.buckets = []
        num_owners = 1 if self.sends_messages and size == 2 else size
        # several buckets have no benefit in shared memory
        for group in group_parameters([*layout], cap if self.sends_messages else 0):
            if memory is not None:
                end = begin + sum(map(padded_size, group))
                rows, begin = (memory.view(size, -1)[:, begin:end], rank), end
            self.buckets.append(Bucket(group, num_owners, is_elementwise, rows))

    def start_next(self, gradients: Gradients, waits: bool) -> None:
        bucket = self.buckets[self.num_started]
        self.num_started += 1
        bucket.pack(gradients)
        self.transport.start(bucket, self.sync_bucket(bucket, gradients), waits)

    def start_rest(self, gradients: Gradients, waits: bool) -> None:
        """Start the remaining buckets."""
        while self.num_started < len(self.buckets):
            self.start_next(gradients, waits)

    @contextmanager
    def overlapping_backward(self) -> Iterator[None]:
        """Start each bucket as soon as a backward pass has accumulated all its gradients."""
        missing = [{*bucket.parameters} for bucket in self.buckets]
        number_of = {p: number for number, group in enumerate(missing) for p in group}

        @torch.no_grad()
        def mark_ready(p: Tensor) -> None:
            if p.grad is not None and p.grad.layout == torch.strided:
                missing[number_of[p]].discard(p)
            while self.num_started < len(missing) and not missing[self.num_started]:
                ready: Any = {q: q.grad for q in self.buckets[self.num_started].parameters}
                self.start_next(ready, waits=False)
            self.num_early = self.num_started

        trained = [p for p in number_of if p.requires_grad]
        hooks = [p.register_post_accumulate_grad_hook(mark_ready) for p in trained]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def is_edited(self, gradients: Gradients) -> bool:
        """Whether a gradient was edited after it was sent during the backward pass."""
        return not all(bucket.matches(gradients) for bucket in self.buckets[: self.num_early])

    def finish(self, gradients: Gradients) -> dict[Any, Any]:
        """Wait for the results of all message schedules, by bucket.

        Sums overwrite those gradients that are a parameter's `grad` and share no memory (autograd
        may give two parameters views of one tensor, if their gradients are equal).
        """
        memories = Counter(storage_of(g) for g in gradients.values())
        local = {p: g for p, g in gradients.items() if g is p.grad and not g.requires_grad}
        targets = {p: g for p, g in local.items() if memories[storage_of(g)] == 1}
        for bucket in self.buckets:
            bucket.targets = targets
        self.num_started = self.num_early = 0
        results = self.transport.finish()
        for bucket in self.buckets:
            bucket.targets = {}  # release memory
        return results


def storage_of(gradient: Tensor) -> int:
    return gradient.untyped_storage().data_ptr()
