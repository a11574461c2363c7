"""The transport: runs several message schedules concurrently, first in, first out."""

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_mgpu.distributed.comm.schedules import Message, MessageSchedule
from lightning_mgpu.distributed.processes.control_plane import ControlPlane

# renamed in torch 2.14
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Transport:
    """Sends first messages when schedules start, and later ones after a control message.

    A process group matches messages by send order. So schedules continue in the order of their
    start, which must be identical in all processes, and never in the order of arrival.

    Args:
        control: Exchanges control messages.
        group: Process group for messages, gloo between CPUs, NCCL between GPUs. None: one process.
        device_type: Of the tensors. Schedules run without autocast, even if a step uses it.
    """

    def __init__(self, control: ControlPlane, group: Any, device_type: str = "cpu") -> None:
        self.control, self.group = control, group
        has_autocast = torch.amp.is_autocast_available(device_type)
        full_precision = partial(torch.autocast, device_type, enabled=False)
        self._no_autocast: Callable[[], Any] = full_precision if has_autocast else nullcontext
        self._in_flight: deque[tuple[Any, MessageSchedule, int, Callable[[], Any]]] = deque()
        self._waiting: list[tuple[Any, MessageSchedule]] = []
        self._results: dict[Any, Any] = {}
        self.memory: dict[Any, Tensor] = {}  # receive buffers, reused because allocation is slow

    def start(self, key: Any, schedule: MessageSchedule, waits: bool = False) -> None:
        """Send the first message of a schedule, or defer it to `finish`. `key` names the result."""
        if waits:
            self._waiting.append((key, schedule))
        else:
            self._advance(key, schedule, 0, None)

    def finish(self) -> dict[Any, Any]:
        """Run all schedules to completion, after a control message. Returns results by key."""
        waiting, self._waiting = self._waiting, []
        for key, schedule in waiting:
            self._advance(key, schedule, 0, None)
        while self._in_flight:
            key, schedule, number, receive = self._in_flight.popleft()
            self._advance(key, schedule, number + 1, receive())
        results, self._results = self._results, {}
        return results

    def _advance(self, key: Any, schedule: MessageSchedule, number: int, received: Any) -> None:
        try:
            with self._no_autocast():
                message = schedule.send(received)
        except StopIteration as end:
            self._results[key] = end.value
            return
        self._in_flight.append((key, schedule, number, self._send((key, number), message)))

    def _send(self, key: Any, message: Message | None) -> Callable[[], Any]:
        """Send a message. Returns a function that waits for the bytes of all processes."""
        if message is None:
            is_first = key[1] == 0  # a control message precedes `finish`
            return (lambda: None) if is_first else self._barrier
        if self.control.skips_sync:
            return lambda: message.sent.repeat(self.control.size)
        return self._post(key, message)

    def _barrier(self) -> None:
        self.control.all_gather(np.zeros(1, np.uint8), "sums")

    def _post(self, key: Any, message: Message) -> Callable[[], Tensor]:
        sent, lengths, sizes = message
        received = self.memory.get(key)
        if received is None or len(received) != sum(sizes):
            received = self.memory[key] = sent.new_empty(sum(sizes))
        options: Any = {"group": self.group, "async_op": True}
        with self.control.naming_others():
            if lengths is None and self.control.size == 2:
                work = all_gather(received, sent, **options)
            else:  # gloo's all_gather is a ring, with P - 1 round trips
                sent = sent.repeat(self.control.size) if lengths is None else sent
                lengths = [*sizes] if lengths is None else [*lengths]
                work = dist.all_to_all_single(received, sent, [*sizes], lengths, **options)
        wait = partial(self.control.wait_for, self.control.watch(work), sent.is_cpu)

        def receive() -> Tensor:
            wait()
            return received

        return receive
