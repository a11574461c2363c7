"""The courier: carries the messages of several routes side by side, first in, first out."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from lightning_mgpu.processes.meeting import Meeting
from lightning_mgpu.routes.sums import Message, Route

# torch 2.14 has renamed it
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Courier:
    """Sends first messages when routes start, if they do not wait, and the others after a meeting.

    A group of processes pairs messages by the order in which they are sent. So routes go on in the
    order in which they have started, which has to be the same in all processes, and never in the
    order in which messages arrive.

    Args:
        meeting: Where processes meet.
        group: For messages: gloo's between CPUs, NCCL's between GPUs. None: one process.
    """

    def __init__(self, meeting: Meeting, group: Any) -> None:
        self.meeting, self.group = meeting, group
        self._under_way: deque[tuple[Any, Route, int, Callable[[], Sequence[Tensor]]]] = deque()
        self._waiting: list[tuple[Any, Route]] = []
        self._results: dict[Any, Any] = {}
        self.kept: dict[Any, Tensor] = {}  # memory: new one in every step would take longer

    def start(self, key: Any, route: Route, waits: bool = False) -> None:
        """Send a route's first message, or let it wait for `finish`. Its result gets the key."""
        if waits:
            self._waiting.append((key, route))
        else:
            self._go_on(key, route, 0, None)

    def finish(self) -> dict[Any, Any]:
        """After a meeting: send first messages that have waited, receive all, and go on.

        Returns the results of the routes, by key.
        """
        waiting, self._waiting = self._waiting, []
        for key, route in waiting:
            self._go_on(key, route, 0, None)
        while self._under_way:
            key, route, number, receive = self._under_way.popleft()
            self._go_on(key, route, number + 1, receive())
        results, self._results = self._results, {}
        return results

    def _go_on(self, key: Any, route: Route, number: int, parts: Any) -> None:
        try:
            message = route.send(parts)
        except StopIteration as end:
            self._results[key] = end.value
            return
        self._under_way.append((key, route, number, self._send((key, number), message)))

    def _send(self, key: Any, message: Message | None) -> Callable[[], Sequence[Tensor]]:
        """Returns a function that waits for the parts of all processes."""
        if message is None:
            is_first = key[1] == 0  # then processes meet before `finish`
            return (lambda: ()) if is_first else self._meet
        if self.meeting.waits_for_nobody:
            return lambda: [message.sent] * self.meeting.size
        return self._post(key, message)

    def _meet(self) -> Sequence[Tensor]:
        self.meeting.gather(np.zeros(1, np.uint8), "sums")
        return ()

    def _post(self, key: Any, message: Message) -> Callable[[], Sequence[Tensor]]:
        sent, lengths, sizes = message
        received = self.kept.get(key)
        if received is None or len(received) != sum(sizes):
            received = self.kept[key] = sent.new_empty(sum(sizes))
        parts = received.split([*sizes])
        options: Any = {"group": self.group, "async_op": True}
        if lengths is None and self.meeting.size == 2:
            work = all_gather(received, sent, **options)
        else:  # as gloo's all_gather goes around a ring, with P - 1 trips
            sent = sent.repeat(self.meeting.size) if lengths is None else sent
            lengths = [*sizes] if lengths is None else [*lengths]
            work = dist.all_to_all_single(received, sent, [*sizes], lengths, **options)
        wait = partial(self.meeting.wait_for, self.meeting.watch(work), sent.is_cpu)

        def receive() -> Sequence[Tensor]:
            wait()
            return parts

        return receive
