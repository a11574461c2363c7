"""The dispatcher: starts the buckets of a model in their order, also within a backward pass."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_mgpu.routes.buckets import Bucket, Gradients, group_parameters, padded_size
from lightning_mgpu.routes.courier import Courier
from lightning_mgpu.routes.sums import Route

MakeRoute = Callable[[Bucket, list[Gradients]], Route]


class Dispatcher:
    """The buckets of a layout of parameters, started in their order.

    Args:
        layout: By parameter, what all processes must find alike.
        num_rows: The replicas of this process.
        cap: Bytes after which a bucket is full; 0 means one bucket.
        courier: Carries the messages.
        in_place: Whether processes sum rows where they are, in memory that all have mapped.
    """

    def __init__(
        self, layout: dict[Tensor, Any], num_rows: int, cap: float, courier: Courier, in_place: bool
    ) -> None:
        self.layout, self.courier, self.num_started, self.num_early = layout, courier, 0, 0
        size, rank = courier.meeting.size, courier.meeting.rank
        memory = None
        if in_place and size > 1:
            num_bytes = num_rows * sum(map(padded_size, layout))
            memory = courier.meeting.map_memory(size * max(num_bytes, 1))
        self.in_place = size == 1 or memory is not None
        self.is_pair = size == 2 and num_rows == 1 and not self.in_place
        rows = None if memory is None else (memory[: size * num_bytes].view(size, -1), rank)
        self.has_messages = size > 1 and not self.in_place
        # one bucket, where nothing is gained by several: all would also have the same memory
        groups = group_parameters([*layout], cap if self.has_messages else 0)
        num_owners = 1 if self.is_pair else size
        self.buckets = [Bucket(group, num_rows, num_owners, rows) for group in groups]

    def start_next(self, replicas: list[Gradients], make_route: MakeRoute, waits: bool) -> None:
        bucket = self.buckets[self.num_started]
        self.num_started += 1
        bucket.pack(replicas)
        self.courier.start(bucket, make_route(bucket, replicas), waits)

    def start_rest(self, replicas: list[Gradients], make_route: MakeRoute, waits: bool) -> None:
        """Start the buckets that have not started, with the gradients of all replicas here."""
        while self.num_started < len(self.buckets):
            self.start_next(replicas, make_route, waits)

    @contextmanager
    def within_pass(self, before: list[Gradients], make_route: MakeRoute) -> Iterator[None]:
        """Start each bucket when a backward pass has accumulated the last of its gradients.

        The pass is that of the last replica here; `before` has the gradients of the others.
        """
        missing = [{*bucket.parameters} for bucket in self.buckets]
        number_of = {p: number for number, group in enumerate(missing) for p in group}

        @torch.no_grad()
        def note(p: Tensor) -> None:
            if p.grad is not None and p.grad.layout == torch.strided:
                missing[number_of[p]].discard(p)
            while self.num_started < len(missing) and not missing[self.num_started]:
                own: Any = {q: q.grad for q in self.buckets[self.num_started].parameters}
                self.start_next([*before, own], make_route, waits=False)
            self.num_early = self.num_started

        hooks = [p.register_post_accumulate_grad_hook(note) for p in number_of if p.requires_grad]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def has_sent_other(self, replicas: list[Gradients]) -> bool:
        """Whether a gradient has been edited since it was sent, within the pass."""
        return not all(bucket.holds(replicas) for bucket in self.buckets[: self.num_early])

    def finish(self, gradients: Gradients) -> dict[Any, Any]:
        """The results of all routes, by bucket.

        They take the memory of these gradients, if it is that of a parameter's own `grad` and of no
        other one: autograd gives two parameters views of one tensor where their gradients are
        equal.
        """
        memories = Counter(map(memory_of, gradients.values()))
        own = {p: g for p, g in gradients.items() if g is p.grad and not g.requires_grad}
        targets = {p: g for p, g in own.items() if memories[memory_of(g)] == 1}
        for bucket in self.buckets:
            bucket.targets = targets
        self.num_started = self.num_early = 0
        return self.courier.finish()


def memory_of(gradient: Tensor) -> int:
    return gradient.untyped_storage().data_ptr()
