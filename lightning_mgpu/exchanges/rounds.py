"""The rounds of an exchange, between processes."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_mgpu.exchanges.runner import HEAD, Looks, drive, run_exchanges
from lightning_mgpu.processes.meeting import start_sending
from lightning_mgpu.strategies import ManualAllreduceStrategy
from lightning_mgpu.strategies.window import Gradients


class Early(NamedTuple):
    """A first round on its way, while what all processes see is not known."""

    run: Any | None  # the exchanges, if this process has started them
    states: dict[int, Any]  # as they were before it
    num_bytes: int  # of a row, without buffers
    receive: Callable[[], np.ndarray]


class RoundsStrategy(ManualAllreduceStrategy):
    """Carries the rows of exchanges, and the replicas' buffers, which travel in the first round."""

    _function: Any  # the exchange, with its options

    def reset_rounds(self) -> None:
        self._states: dict[int, Any] = {replica: {} for replica in self.local_replicas}
        self._plans: dict[Any, Any] = {}
        self._last_looks: Looks = ()  # of the step before
        self._expected: Looks = ()  # the same, if the step before that one had them, too
        self._num_buffer_bytes = 0  # in the last first round
        self.num_bytes = np.zeros(2)  # sent by one replica: by this exchange, by the exact sum

    def _named(self) -> dict[str, Tensor]:
        return dict(self.module.named_parameters())

    def _start_early(self, looks: Looks, replicas: list[Gradients]) -> Early | None:
        """Send a first round beside the meeting, as if this step looked like the two before it.

        All processes send a row of the same length, or none does. One that sees more than is
        expected sends zeros, and then no process keeps the round.
        """
        expected, plan = self._expected, self._plans.get(self._expected)
        # between GPUs, a process that fails meanwhile would leave the others in a kernel
        is_slow = not self.is_alone and self.cells is None and self.root_device.type == "cpu"
        if not plan or not is_slow:
            return None
        num_bytes = HEAD + plan[0].num_bytes
        num_buffer_bytes = len(self._buffers[0]) if self._buffers else 0
        is_alike = num_buffer_bytes == self._num_buffer_bytes and len(looks) == len(expected)
        states, run = deepcopy(self._states), None
        if is_alike and all(here <= most for here, most in zip(looks, expected)):
            run = self._new_run(replicas, expected)
            rows = self._add_buffers(next(run)[0])
        else:
            length = num_bytes + self._num_buffer_bytes
            rows = torch.zeros(self.num_local, length, dtype=torch.uint8)
        # by another group than a meeting's: a process may be at another place
        return Early(run, states, num_bytes, start_sending(self, rows.flatten().numpy(), None))

    def _new_run(self, replicas: list[Gradients], looks: Looks) -> Any:
        named, k = self._named(), self.num_replicas
        return run_exchanges(self._function, named, replicas, self._states, looks, k, self._plans)

    def _run(
        self, replicas: list[Gradients], looks: Looks, early: Early | None = None
    ) -> Gradients:
        """The exchange of all parameters. The replicas' buffers travel in its first round."""
        run = rows = None
        if early is not None:
            received = torch.from_numpy(early.receive()).view(self.num_replicas, -1)
            if early.run and looks == self._expected:  # then every process has started one
                run, rows = early.run, self._take_buffers(received, early.num_bytes)
            else:
                self._states = early.states
                self.num_bytes[0] += early.num_bytes
        self._expected = looks if looks == self._last_looks else ()
        self._last_looks = looks
        self._num_buffer_bytes = len(self._buffers[0]) if self._buffers else self._num_buffer_bytes
        meet = partial(self.gather_rows, purpose="an exchange")
        results, n = drive(run or self._new_run(replicas, looks), meet, self._send, rows)
        if self._buffers:  # there was no round
            self.share_buffers()
        self.num_bytes[0] += n
        return results

    def _send(self, rows: Tensor) -> Tensor:
        return self._take_buffers(self.gather_rows(self._add_buffers(rows)), rows.shape[1])

    def _add_buffers(self, rows: Tensor) -> Tensor:
        return torch.cat([rows, torch.stack(self._buffers)], dim=1) if self._buffers else rows

    def _take_buffers(self, sent: Tensor, num_bytes: int) -> Tensor:
        if sent.shape[1] > num_bytes:
            super().share_buffers(sent[:, num_bytes:].contiguous())
        return sent[:, :num_bytes]

    def _gather_objects(self, own: Any) -> list[Any]:
        """Those of all processes. While it waits, it sees signals, unlike torch's collectives."""
        torch.save(own, content := BytesIO())
        sizes = self.gather(np.array([content.tell()]), "sizes of states").ravel()
        row = np.zeros(sizes.max(), np.uint8)
        row[: content.tell()] = np.frombuffer(content.getbuffer(), np.uint8)
        rows = self.gather(row, "states")
        files = (BytesIO(each[:size]) for each, size in zip(rows, sizes))
        return [torch.load(file, weights_only=True) for file in files]
