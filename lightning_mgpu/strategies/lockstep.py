"""Replicas that meet in the middle of a step: a thread each, of which one runs at a time.

The caller's thread lets one replica after the other run until it meets or has finished. When all
replicas have come to the same meeting, the thread runs the meeting's action, once, and lets them
go on. So replicas never run at the same time, and an action for all runs in the caller's thread.
With several processes each runs the action, with what the replicas of all have brought.
"""

import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from lightning_mgpu.strategies.devices_and_attributes import current_device
from lightning_mgpu.strategies.processes import Processes


class Stop(NamedTuple):
    """Where a replica waits, and for what."""

    where: tuple[str, Any]  # a name, and something that must be the same for all
    value: Any  # that it has brought there; at the end its result
    action: Callable[[dict[int, Any]], Any] | None = None  # for which all wait


class Lockstep:
    """Runs steps whose replicas meet. `turn(i)` enters replica i's turn."""

    def __init__(
        self,
        devices: Sequence[torch.device],
        turn: Callable[[int], AbstractContextManager],
        processes: Processes,
    ) -> None:
        self.devices, self.turn, self.processes = devices, turn, processes
        self.running: _Replica | _BackwardPass | None = None  # whose thread it is
        self.begin()

    def begin(self) -> None:
        """A step begins, in which replicas may not meet."""
        self.active: Sequence[int] = ()  # the replicas that meet in the step, in all processes
        self.is_one_graph = False  # tensors with graphs have been exchanged
        self._num_exchanges = 0

    def run(
        self, function: Callable[[int], Any], here: Sequence[int], active: Sequence[int]
    ) -> list[Any]:
        """Call `function(i)` for every replica that is here, and return the results.

        `active` are those of all processes. An error in one of them ends all.
        """
        self._here, self.active = here, active
        modes = _modes({"cpu", *(device.type for device in self.devices)})
        replicas = {i: _Replica(i, partial(function, i), modes, self.devices[i]) for i in here}
        answer = None
        try:
            while True:
                stops = {i: self._go_on(replica, answer) for i, replica in replicas.items()}
                action = stops[here[0]].action
                places = {i: stop.where for i, stop in stops.items()}
                values = {i: stop.value for i, stop in stops.items() if action}
                shared = self.processes.share("a meeting of replicas", (places, values))
                _check_agreement({i: place for part, _ in shared for i, place in part.items()})
                if action is None:
                    return [stop.value for stop in stops.values()]
                answer = action({i: value for _, part in shared for i, value in part.items()})
        finally:
            for replica in replicas.values():
                replica.end()

    def _go_on(self, replica: "_Replica", answer: Any) -> Stop:
        """Let a replica run until it meets or has finished; raise what it raises."""
        with self.turn(replica.index):
            self.running = replica
            try:
                replica.answers.put(answer)
                stop = replica.stops.get()
            finally:
                self.running = None
            if isinstance(stop, BaseException):
                raise stop
            return stop

    def meet(
        self, where: tuple[str, Any], value: Any, action: Callable[[dict[int, Any]], Any]
    ) -> Any:
        """Wait for the other replicas. `action` is called once with all values; return its answer.

        `where` is a name, and something that must be the same for all.
        """
        assert self.running is not None
        return self.running.stop(Stop(where, value, action))

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Inside the block a step's code, if it runs again, is refused what replicas met for."""
        self.running = _BackwardPass() if self.active else None
        try:
            yield
        finally:
            self.running = None

    def exchange(self, name: str, tensors: Sequence[Tensor], *others: Any) -> list[tuple[Any, ...]]:
        """Give tensors, and other values, to all replicas, and get theirs, in order of replicas.

        Gradients flow back to the replicas that have given the tensors, in whichever process they
        are. From then on the replicas' graphs are one.
        """
        assert self.running is not None
        index, home = self.running.index, self.devices[0]
        if torch._C._are_functorch_transforms_active():  # private: in `torch.func.grad`
            self.refuse_own_pass()
        if not torch.is_grad_enabled():  # here: the threads of replicas have modes of their own
            tensors = [tensor.detach() for tensor in tensors]
        self.is_one_graph |= any(tensor.requires_grad for tensor in tensors)

        def join(given: dict[int, Any]) -> dict[int, list[tuple[list[Tensor], Any]]]:
            """By replica that is here: copies of the tensors of all, and the other values."""
            self._num_exchanges += 1
            here = [i for i in given if i in self._here]
            own = [tensor for i in here for tensor in given[i][0]]
            meeting = f"gradients of {name} {self._num_exchanges}"
            exchange = Exchange(self, meeting, list(given), here, len(tensors))
            values = [tensor.detach() for tensors, _ in given.values() for tensor in tensors]
            with torch.inference_mode(False), torch.enable_grad():  # a replica may have, in a test
                copies = iter(Share.apply(exchange, values, *own))
            return {
                i: [([next(copies) for _ in each], others) for each, others in given.values()]
                for i in here
            }

        value = [tensor.to(home) for tensor in tensors], others
        answer = self.meet((name, len(tensors)), value, join)
        device = self.devices[index]
        return [(*(each.to(device) for each in copies), *rest) for copies, rest in answer[index]]

    def refuse_own_pass(self) -> None:
        """Refuse a backward pass of one replica, which the others' gradients do not come to."""
        if isinstance(self.running, _Replica):
            raise RuntimeError(
                "training_step computes gradients of what replicas have exchanged (sync_batchnorm, "
                "all_gather), which would be those of its shard: leave one of the two out, or use "
                "one device."
            )


def _check_agreement(places: dict[int, tuple[str, Any]]) -> None:
    """Refuse replicas that wait at different places."""
    (first, where), *others = places.items()
    for i, other in others:
        if other != where:
            raise RuntimeError(
                f"replica {first} is at {where[0]}, replica {i} at {other[0]}: whatever is in its "
                "shard, every replica must come to the same layers (BatchNorm), exchanges, "
                "manual_backward and optimizers, and as often."
            )


class _Replica:
    """A replica's thread."""

    def __init__(
        self, index: int, step: Callable[[], Any], modes: Any, device: torch.device
    ) -> None:
        self.index = index
        self.answers, self.stops = SimpleQueue[Any](), SimpleQueue[Stop | BaseException]()
        run = partial(contextvars.copy_context().run, self._run, step, modes, device)
        self._thread = threading.Thread(target=run, name=f"replica-{index}", daemon=True)
        self._thread.start()

    def stop(self, stop: Stop) -> Any:
        self.stops.put(stop)
        if isinstance(answer := self.answers.get(), _End):
            raise answer
        return answer

    def end(self) -> None:
        """End the replica where it waits, after an error in another one."""
        self.answers.put(_End())
        self._thread.join(timeout=10)

    def _run(self, step: Callable[[], Any], modes: Callable[[], Any], device: torch.device) -> None:
        if isinstance(self.answers.get(), _End):
            return
        try:
            with modes(), current_device(device):
                value = step()
            self.stops.put(Stop(("the end of its training_step", None), value))
        except BaseException as error:
            self.stops.put(error)


class _BackwardPass:
    """Runs when no replica can meet another one, and has no number."""

    def __getattr__(self, name: str) -> Any:
        refuse_again("what replicas have met for")


def refuse_again(what: str) -> NoReturn:
    """Refuse a backward pass that runs code of a step again."""
    raise RuntimeError(
        f"The backward pass computes {what} again (activation checkpointing, an adjoint method), "
        "or looks at it (a hook on a tensor), which does not work where replicas have exchanged "
        "tensors: leave out sync_batchnorm=True, or all_gather, or that."
    )


class Exchange(NamedTuple):
    """A meeting whose gradients meet, too, in the backward pass."""

    lockstep: Lockstep
    name: str
    active: list[int]  # the replicas of all processes
    here: list[int]
    num_tensors: int  # that each has given


class Share(torch.autograd.Function):
    """Copies of what all replicas have given, for each one that is here, as one node of the graph.

    The backward passes of all processes come to it. Each gradient is the sum over the replicas that
    got a copy, in their order. Autograd has a thread per device, and would add in any order.
    """

    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange, values: list[Tensor], *own: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.exchange = exchange
        return tuple(value.clone() for _ in exchange.here for value in values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        lockstep, name, active, here, n = ctx.exchange
        lockstep.refuse_own_pass()
        num = n * len(active)
        mine = {i: grads[num * place : num * (place + 1)] for place, i in enumerate(here)}
        shared = lockstep.processes.share(name, mine)
        by_receiver = {i: each for part in shared for i, each in part.items()}
        places = [n * active.index(i) + tensor for i in here for tensor in range(n)]
        return (
            None,
            None,
            *(torch.stack([by_receiver[i][place] for i in active]).sum(0) for place in places),
        )


class _End(BaseException):
    """Ends a replica that waits."""


def _modes(types: set[str]) -> Callable[[], AbstractContextManager]:
    """The thread's modes of autograd, inference and autocast, by device type, for another one."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast = {
        each: torch.get_autocast_dtype(each) for each in types if torch.is_autocast_enabled(each)
    }

    @contextmanager
    def entered() -> Iterator[None]:
        with ExitStack() as stack, torch.inference_mode(inference), torch.set_grad_enabled(grad):
            for each, dtype in autocast.items():
                stack.enter_context(torch.autocast(each, dtype, cache_enabled=False))
            yield

    return entered
