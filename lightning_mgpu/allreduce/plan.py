"""The plan by which k processes run an allreduce as written, each on its own tensor.

They run in supersteps: local operations, then messages, which can be read in the next superstep
(Valiant, 'A Bridging Model for Parallel Computation', 1990). record.py creates the plan.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Ref(int):
    """The index of a tensor. Indices 0 to k - 1 are the arguments of the allreduce."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


class Constant:
    """A tensor that is identical in all processes."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach().clone()

    def __repr__(self) -> str:
        return f"{self.tensor.dtype}{self.tensor.tolist()}"


class Operation(NamedTuple):
    """A call of an operator on one device. In arguments and results, Refs replace tensors."""

    device: int
    superstep: int
    function: Any
    args: Any
    kwargs: dict[str, Any]
    results: Any
    line: str  # of the user's function: file and line number


class Message(NamedTuple):
    """A tensor that is sent at the end of a superstep."""

    source: int
    target: int
    superstep: int
    like: Tensor  # dense, on `meta`
    begin: int  # offset in the bytes from the source to the target in this superstep
    sent: Ref
    received: Ref
    line: str

    def view(self, row: Tensor) -> Tensor:
        """The message's tensor as a view of these bytes."""
        values = row[self.begin : self.begin + self.like.nbytes].view(self.like.dtype)
        return values.as_strided(self.like.shape, self.like.stride())


class Superstep:
    """One device's part of a superstep.

    Attributes:
        steps: Its operations and the messages that it sends, in the order of the program.
        received: The messages that it receives.
        bytes_to, bytes_from: The number of bytes to and from each of the k devices.
    """

    def __init__(self, k: int) -> None:
        self.steps: list[Operation | Message] = []
        self.received: list[Message] = []
        self.bytes_to, self.bytes_from = [0] * k, [0] * k


class Plan:
    """A call of an allreduce on k tensors, in the order of the program and by device.

    Attributes:
        like: A tensor on `meta` with the shape, strides and dtype of all k.
        num_supersteps: Supersteps with messages. Operations may follow the last of them.
        sent, received: Total bytes by device.
    """

    def __init__(self, k: int, like: Tensor, steps: Sequence[Operation | Message]) -> None:
        self.k, self.like, self.steps = k, like, steps
        self.messages = [step for step in steps if isinstance(step, Message)]
        self.num_supersteps = max((m.superstep + 1 for m in self.messages), default=0)
        self._by_device = [[Superstep(k) for _ in range(self.num_supersteps + 1)] for _ in range(k)]
        for step in steps:
            device = step.device if isinstance(step, Operation) else step.source
            self._by_device[device][step.superstep].steps.append(step)
        for message in self.messages:
            sender = self._by_device[message.source][message.superstep]
            receiver = self._by_device[message.target][message.superstep]
            receiver.received.append(message)
            end = message.begin + message.like.nbytes
            sender.bytes_to[message.target] = receiver.bytes_from[message.source] = end
        self.sent = [sum(sum(s.bytes_to) for s in steps) for steps in self._by_device]
        self.received = [sum(sum(s.bytes_from) for s in steps) for steps in self._by_device]

    def steps_of(self, device: int) -> list[Superstep]:
        """Its `num_supersteps` + 1 supersteps. The last one has no messages."""
        return self._by_device[device]

    def describe(self) -> list[str]:
        """One string per step, equal for equal steps in all processes."""
        return [repr(tuple(step[:-1])) for step in self.steps]

    def digest(self) -> str:
        """A hash, equal in all processes that have recorded the same plan."""
        text = f"{self.k} {layout_of(self.like)} {self.describe()}"
        return hashlib.sha256(text.encode()).hexdigest()


class Execution:
    """One process's part of a plan, on its own tensor, in place.

    In every superstep call `advance`, send its results, and call `receive`; at the end call
    `advance(plan.num_supersteps)`.

    Raises:
        ValueError: If the plan is for a tensor with different shape, strides or dtype.
    """

    def __init__(self, plan: Plan, rank: int, tensor: Tensor) -> None:
        if layout_of(tensor) != layout_of(plan.like):
            planned, actual = layout_of(plan.like), layout_of(tensor)
            raise ValueError(f"the plan is for a tensor of {planned}, not of {actual}")
        self.supersteps, self.device = plan.steps_of(rank), tensor.device
        self.values: dict[Any, Any] = {rank: tensor}  # by Ref

    @torch.no_grad()
    def advance(self, superstep: int, outgoing: Sequence[Tensor] | None = None) -> Sequence[Tensor]:
        """Run the operations of a superstep; returns the bytes for each process.

        Args:
            superstep: 0 to `plan.num_supersteps`, in this order.
            outgoing: Memory for the bytes: `bytes_to` uint8 elements for each process. It begins
                at multiples of 16 bytes. Default: new memory.
        """
        part = self.supersteps[superstep]
        if outgoing is None:
            sizes = part.bytes_to
            outgoing = [torch.empty(n, dtype=torch.uint8, device=self.device) for n in sizes]
        for step in part.steps:
            if isinstance(step, Message):
                step.view(outgoing[step.target]).copy_(self.values[step.sent])
            else:
                args, kwargs = replace((step.args, step.kwargs), self._find)
                results = step.function(*args, **kwargs)
                self.values.update(zip(leaves(step.results), leaves(results)))
        return outgoing

    def receive(self, superstep: int, incoming: Sequence[Tensor]) -> None:
        """Use the bytes from each process, `bytes_from` many. Operations may write to them."""
        for message in self.supersteps[superstep].received:
            self.values[message.received] = message.view(incoming[message.source])

    def _find(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self.values[value]
        if isinstance(value, Constant):
            return value.tensor.to(self.device)
        return self.device if isinstance(value, torch.device) else value


def run_plan(plan: Plan, tensors: Sequence[Tensor]) -> None:
    """Run all parts of a plan in this process, on k tensors, in place."""
    executions = [Execution(plan, rank, tensor) for rank, tensor in enumerate(tensors)]
    for superstep in range(plan.num_supersteps):
        sent = [run.advance(superstep) for run in executions]
        for rank, run in enumerate(executions):
            run.receive(superstep, [parts[rank] for parts in sent])
    for run in executions:
        run.advance(plan.num_supersteps)


def layout_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def replace(value: Any, function: Callable[[Any], Any]) -> Any:
    """Map the leaves of lists, tuples and dicts (faster than torch's pytree)."""
    if isinstance(value, (list, tuple)):
        return type(value)([replace(item, function) for item in value])
    if isinstance(value, dict):
        return {name: replace(item, function) for name, item in value.items()}
    return function(value)


def leaves(value: Any) -> list[Any]:
    found: list[Any] = []
    replace(value, found.append)
    return found
