"""Replicas that meet in the middle of a step: a thread each, of which one runs at a time.

The caller's thread lets one replica after the other run until it meets or is through. When all have come to the same
meeting it does what they meet for, once, and lets them go on. So replicas never run side by side, and what is done for
all of them is done in the caller's thread.
"""

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from lightning_mgpu.strategies.one_process import current_device

Action = Callable[[dict[int, Any]], Any]


class Lockstep:
    """Runs steps whose replicas meet, one replica a device. `turn` enters a replica's turn."""

    def __init__(self, devices: Sequence[torch.device], turn: Callable[[int], AbstractContextManager]) -> None:
        self.devices, self.turn = devices, turn
        self.active: Sequence[int] = ()  # the replicas of the step
        self.running: _Replica | None = None  # whose thread it is

    def run(self, function: Callable[[int], Any], active: Sequence[int]) -> list[Any]:
        """Call `function(i)` for every active replica, and return the results.

        Raises:
            Exception: What a replica, or what they met for, has raised.
            RuntimeError: If some replicas meet and others do not.
        """
        self.active, modes = active, _modes({device.type for device in self.devices})
        replicas = {i: _Replica(i, self.devices[i], partial(function, i), modes) for i in active}
        try:
            while True:
                for i, replica in replicas.items():
                    with self.turn(i):
                        self.running = replica
                        try:
                            replica.go_on()
                        finally:
                            self.running = None
                meetings = {i: replica.meeting for i, replica in replicas.items()}
                if not any(meetings.values()):
                    return [replica.value for replica in replicas.values()]
                action = _agreed(meetings)
                answer = action({i: replica.value for i, replica in replicas.items()})
                for replica in replicas.values():
                    replica.value = answer
        finally:
            for replica in replicas.values():
                replica.end()

    def meet(self, meeting: tuple[str, Any], value: Any, action: Action) -> Any:
        """Wait for the other replicas, let `action` be called once with what all have brought, and return its answer.

        The meeting has a name, and something that must be the same for all.
        """
        assert self.running is not None
        return self.running.meet(meeting, value, action)


def _agreed(meetings: dict[int, Any]) -> Action:
    """What the replicas meet for."""
    (first, meeting), *others = meetings.items()
    for i, other in others:
        if (meeting and meeting[0]) != (other and other[0]):
            said = [f"waits in {each[0][0]}" if each else "has ended its training_step" for each in (meeting, other)]
            raise RuntimeError(
                f"replica {first} {said[0]}, replica {i} {said[1]}: every replica must call manual_backward and "
                "step as often, and for the same optimizer, whatever is in its shard."
            )
    return meeting[1]  # type: ignore[no-any-return]


class _Replica:
    """A replica's thread. `value` is what it brings to a meeting, what that answers, and at last its result."""

    def __init__(self, index: int, device: torch.device, step: Callable[[], Any], modes: Any) -> None:
        self.index, self.meeting, self.value = index, None, None
        self._error: BaseException | None = None
        self._is_ended = False
        self._may_run, self._has_paused = threading.Semaphore(0), threading.Semaphore(0)
        run = partial(contextvars.copy_context().run, self._run, step, modes, device)
        self._thread = threading.Thread(target=run, name=f"replica-{index}", daemon=True)
        self._thread.start()

    def go_on(self) -> None:
        """Let the replica run until it meets or is through; raise what it raises."""
        self._may_run.release()
        self._has_paused.acquire()
        if self._error is not None:
            raise self._error

    def meet(self, meeting: tuple[str, Any], value: Any, action: Action) -> Any:
        self.meeting, self.value = (meeting, action), value  # type: ignore[assignment]
        self._has_paused.release()
        self._pause()
        self.meeting, answer, self.value = None, self.value, None
        return answer

    def _pause(self) -> None:
        self._may_run.acquire()
        if self._is_ended:
            raise _Ended

    def end(self) -> None:
        """End the replica where it waits, after an error in another one."""
        self._is_ended = True
        self._may_run.release()
        self._thread.join(timeout=10)

    def _run(self, step: Callable[[], Any], modes: Callable[[], Any], device: torch.device) -> None:
        try:
            self._pause()
            with modes(), current_device(device):
                self.value = step()
        except _Ended:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self._has_paused.release()


class _Ended(BaseException):
    """Ends a replica that waits."""


def _modes(kinds: set[str]) -> Callable[[], AbstractContextManager]:
    """The calling thread's modes of autograd, inference and autocast, for another thread."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast = {kind: torch.get_autocast_dtype(kind) for kind in kinds | {"cpu"} if torch.is_autocast_enabled(kind)}

    @contextmanager
    def entered() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(inference))
            stack.enter_context(torch.set_grad_enabled(grad))
            for kind, dtype in autocast.items():
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
            yield

    return entered
