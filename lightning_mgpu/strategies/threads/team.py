"""One thread a device: the replicas of a step run side by side, and can meet in the middle of it.

A `Team` runs a function once for every replica. Replica 0 runs in the calling thread, so that profilers and debuggers
see it, the others in threads of their own, with the caller's context variables (settings of torch.compile, say), its
autograd, inference and autocast modes, its default device and their share of the cores. `exchange` is the one way
replicas meet: everybody gives a value and gets all of them.

With `turns` only one replica runs at a time, each with its own random streams: how replicas that draw random numbers
from a generator they share (the CPU's, or that of a GPU with two replicas) stay reproducible.
"""

import contextlib
import contextvars
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from lightning_mgpu.strategies.threads.device_module import current_device, device_module
from lightning_mgpu.strategies.threads.forward_mode import is_inside, one_at_a_time
from lightning_mgpu.strategies.threads.generators import Streams, generator_states, set_generator_states


class Team:
    """Threads for replicas on the given devices.

    Raises (from `run`):
        Exception: What a replica raised, as itself, with a note that names the replica and its device. The others are
            released where they wait for it.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = list(devices)
        self.num_threads = torch.get_num_threads()
        num_cpu_replicas = sum(device.type == "cpu" for device in self.devices)
        self.share = max(1, self.num_threads // max(1, num_cpu_replicas))
        self.here = threading.local()  # .index: which replica this thread runs, if any
        self.meeting: _Meeting | None = None
        self._tasks: list[queue.SimpleQueue] = [queue.SimpleQueue() for _ in self.devices]
        self._threads: list[threading.Thread] = []

    @property
    def index(self) -> int:
        """The replica the calling thread runs; 0 outside of `run`."""
        return getattr(self.here, "index", 0)

    @property
    def is_running(self) -> bool:
        return self.meeting is not None

    @property
    def active(self) -> list[int]:
        """The replicas that run."""
        return self.meeting.active if self.meeting is not None else []

    def run(
        self,
        function: Callable[[int], Any],
        active: Sequence[int],
        turns: Streams | None = None,
        all_cores: bool = True,
    ) -> list[Any]:
        """Call `function(i)` for every replica of `active`, side by side or in turns, and return the results.

        A replica whose turn it is has all cores, or with `all_cores=False` its share as if it ran beside the others:
        the number of threads has a say in how sums are rounded.
        """
        num_threads = self.num_threads if turns is not None and all_cores else self.share
        modes = _Modes(self.devices)
        meeting = self.meeting = _Meeting(active, turns is not None)
        results: dict[int, Any] = {}
        done = threading.Semaphore(0)

        def task(i: int) -> None:
            self.here.index = i
            try:
                swap = self._swap(turns, i) if turns is not None else None
                with meeting.attend(i, swap), modes.entered(self.devices[i]), one_at_a_time():
                    results[i] = function(i)
            except _Released:
                pass
            except BaseException as error:
                meeting.fail(i, error)
            finally:
                self.here.index = 0
                done.release()

        others = [i for i in active if i != 0]
        if others and not self._threads:
            self._start()
        before = torch.get_num_threads()
        try:
            for i in others:
                self._tasks[i].put((contextvars.copy_context(), task, num_threads))
            if 0 in active:
                if others and num_threads != before and self.devices[0].type == "cpu":
                    torch.set_num_threads(num_threads)
                task(0)
            for _ in active:
                done.acquire()
        except BaseException as error:  # Ctrl-C while waiting for the others
            meeting.fail(-1, error)
            raise
        finally:
            if torch.get_num_threads() != before:
                torch.set_num_threads(before)
            self.meeting = None
        if meeting.error is not None:
            raise self._named(*meeting.error)
        return [results[i] for i in active]

    def exchange(self, value: Any = None) -> list[Any]:
        """Wait until every active replica is here, and return what each of them gave, in order.

        Raises:
            RuntimeError: If another replica ended its step instead of coming here, or this one is inside forward-mode
                AD, which others may be waiting to enter.
        """
        if is_inside():
            raise RuntimeError("replicas cannot meet (manual_backward, step, sync_batchnorm) inside forward-mode AD.")
        assert self.meeting is not None, "only replicas in a running step can meet"
        return self.meeting.exchange(self.index, value)

    @contextlib.contextmanager
    def for_all(self) -> Iterator[None]:
        """What a replica does here it does for all: an error of it is not named the replica's."""
        try:
            yield
        except BaseException as error:
            if self.meeting is not None:
                self.meeting.fail(-1, error)
            raise

    def close(self) -> None:
        """End the threads."""
        for thread, tasks in zip(self._threads, self._tasks[1:]):
            tasks.put(None)
            thread.join(timeout=5)
        self._threads = []

    def _start(self) -> None:
        for i, device in list(enumerate(self.devices))[1:]:
            thread = threading.Thread(target=self._work, args=(i,), name=f"replica-{i}-{device}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _work(self, i: int) -> None:
        set_to = 0
        while (order := self._tasks[i].get()) is not None:
            context, task, num_threads = order
            if num_threads != set_to:
                torch.set_num_threads(num_threads)  # of this thread alone
                set_to = num_threads
            context.run(task, i)
            del order, context, task  # do not keep the step's tensors while waiting for the next

    def _swap(self, turns: Streams, i: int) -> Callable[[bool], None]:
        """A function that puts replica i's generator states in place (True) and takes them back (False)."""

        def swap(begin: bool) -> None:
            if begin:
                set_generator_states(self.devices[i], turns[i])
            else:
                turns[i] = generator_states(self.devices[i])

        return swap

    def _named(self, i: int, error: BaseException) -> BaseException:
        if i >= 0 and len(self.devices) > 1:
            note = f"raised in replica {i} on {self.devices[i]}"
            if hasattr(error, "add_note"):
                error.add_note(note)
            elif len(error.args) == 1 and isinstance(error.args[0], str):  # Python 3.10
                error.args = (f"{error.args[0]} ({note})",)
        return error


class _Released(Exception):
    """Ends a replica that waits for one that failed."""


class _Meeting:
    """The state of one `run`: who is where."""

    def __init__(self, active: Sequence[int], in_turns: bool) -> None:
        self.active = list(active)
        self.turn = self.active[0] if in_turns else None
        self.values: dict[int, Any] = {}
        self.result: list[Any] = []
        self.count = 0  # exchanges so far
        self.finished: set[int] = set()
        self.error: tuple[int, BaseException] | None = None
        self.changed = threading.Condition()
        self.swaps: dict[int, Callable[[bool], None] | None] = {}

    @contextlib.contextmanager
    def attend(self, i: int, swap: Callable[[bool], None] | None) -> Iterator[None]:
        self.swaps[i] = swap
        with self.changed:
            self._await_turn(i)
        try:
            yield
        except BaseException as error:
            if not isinstance(error, _Released):
                self.fail(i, error)  # before the others see that it has ended
            raise
        finally:
            with self.changed:
                self.finished.add(i)
                self._pass_turn(i)
                self.changed.notify_all()

    def exchange(self, i: int, value: Any) -> list[Any]:
        with self.changed:
            number = self.count
            self.values[i] = value
            if len(self.values) == len(self.active):
                self.result = [self.values[j] for j in self.active]
                self.values = {}
                self.count += 1
            self._pass_turn(i)
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.count > number or self.finished or self.error)
            if self.error:
                raise _Released
            if self.count == number:
                raise RuntimeError(
                    f"replica {i} waits for replica {min(self.finished)}, which has ended its step: every replica must "
                    "call manual_backward and optimizer.step the same number of times, whatever is in its shard."
                )
            result = self.result
            self._await_turn(i)
            return result

    def fail(self, i: int, error: BaseException) -> None:
        with self.changed:
            self.error = self.error or (i, error)
            self.changed.notify_all()

    def _await_turn(self, i: int) -> None:
        if self.turn is None:
            return
        self.changed.wait_for(lambda: self.turn == i or self.error)
        if self.error:
            raise _Released
        if swap := self.swaps[i]:
            swap(True)

    def _pass_turn(self, i: int) -> None:
        if self.turn != i:
            return
        if swap := self.swaps[i]:
            swap(False)
        waiting = [j for j in self.active if j not in self.finished and j not in self.values]
        self.turn = waiting[0] if waiting else -1


class _Modes:
    """The calling thread's autograd, inference and autocast modes and default device, for other threads."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.thread = threading.get_ident()
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.default_device = torch.get_default_device()
        kinds = sorted({"cpu", "cuda"} | {device.type for device in devices if device_module(device) is not None})
        self.autocast = {kind: torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}

    @contextlib.contextmanager
    def entered(self, device: torch.device) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if threading.get_ident() != self.thread:
                stack.enter_context(torch.inference_mode(self.inference))
                stack.enter_context(torch.set_grad_enabled(self.grad))
                if self.default_device.type != "cpu":
                    stack.enter_context(device if device.type == self.default_device.type else self.default_device)
                if self.autocast:  # a CPU replica beside a GPU takes the GPU's type
                    dtype = self.autocast.get(device.type, next(iter(self.autocast.values())))
                    stack.enter_context(torch.autocast(device.type, dtype=dtype, cache_enabled=False))
            stack.enter_context(current_device(device))
            yield
