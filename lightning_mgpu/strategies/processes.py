"""Processes that train together send each other messages, all at the same points of a step.

A message is a Python object. Tensors in it travel as they lie in memory. They arrive on the
receiver's device, or on the CPU if they were there. The processes find each other by a store of
torch.distributed. They are not its default group: `dist.is_initialized()` stays False, or metrics
and loggers would add up over processes what each of them has as a whole.

A message begins with a frame of fixed size, and every process sends one to each other in every
round. So an error in one process reaches the others wherever they wait.
"""

import pickle
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from io import BytesIO
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

FRAME = 4096  # bytes that a message begins with; hardly any has more, except gradients
LENGTHS = struct.Struct("qq")  # of the message, and of its pickled part
ALIGNMENT = 64  # bytes
FAILED = "an error"  # the name of the round in which a process fails


class Layout(NamedTuple):
    """A tensor in a message, without its bytes."""

    start: int  # of its bytes
    num_bytes: int
    dtype: torch.dtype
    shape: list[int]  # with the outermost dimension in memory first
    dims: list[int]  # where the tensor's own dimensions are in this shape
    requires_grad: bool
    is_on_cpu: bool


class Processes:
    """All processes of a run, of which this is number `rank`. A single one gets its own messages.

    Args:
        home: The device of this process where messages arrive.
        seconds: How long this process waits for another one.
        store: Where processes find each other; None for a single one.
    """

    def __init__(
        self,
        home: torch.device,
        rank: int = 0,
        num: int = 1,
        seconds: float = 60.0,
        store: dist.Store | None = None,
    ) -> None:
        self.home, self.rank, self.num, self.seconds = home, rank, num, seconds
        self.known: Sequence[Any] = ()  # objects of which every process has one: numbers travel
        self.is_over = False  # whether a process has failed
        self._others = [other for other in range(num) if other != rank]
        self._group: Any = None
        if store is not None:
            self._group = dist.ProcessGroupGloo(store, rank, num, timedelta(seconds=seconds))

    def share(self, name: str, value: Any, seconds: float = 0.0) -> list[Any]:
        """What every process gives, in order.

        Args:
            name: Where the processes are in the program: the same for all.
            value: May hold tensors, and objects of `known`.
            seconds: How long to wait at least.
        """
        if self.num == 1:
            return [value]
        message = self._pack(name, value)
        return self._round(name, value, dict.fromkeys(self._others, message), seconds)

    def exchange(self, name: str, values: Sequence[Any]) -> list[Any]:
        """Give `values[i]` to process i, and get what every process gives this one, in order."""
        if self.num == 1:
            return list(values)
        messages = {other: self._pack(name, values[other]) for other in self._others}
        return self._round(name, values[self.rank], messages, 0.0)

    def fail(self, error: BaseException) -> None:
        """Tell the others of an error, where they wait next or fail, too. Then all is over."""
        if self.num > 1 and not self.is_over:
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:900]  # fits a frame
            with suppress(Exception):
                self._round(FAILED, text, dict.fromkeys(self._others, self._pack(FAILED, text)), 0)
            self.is_over = True

    def close(self) -> None:
        """Leave the others."""
        self.is_over, self._group = True, None

    def _round(
        self, name: str, own: Any, messages: Mapping[int, Tensor], seconds: float
    ) -> list[Any]:
        """Send every other process a message and get one from each."""
        if self.is_over:
            raise RuntimeError("The processes of this run have ended: start it again.")
        self.is_over = True  # until all has gone well
        limit = timedelta(seconds=max(seconds, self.seconds))
        frames = {other: torch.empty(FRAME, dtype=torch.uint8) for other in self._others}
        self._transfer(name, {i: each[:FRAME] for i, each in messages.items()}, frames, limit)
        bodies = {i: self._body(frame) for i, frame in frames.items()}
        for i, body in bodies.items():
            if len(body) == FRAME and name != FAILED:
                their_name, text = self._unpack(body)
                if their_name == FAILED:
                    raise RuntimeError(f"process {i} has ended with {text}")
        rests = {i: body[FRAME:] for i, body in bodies.items()}
        self._transfer(name, {i: each[FRAME:] for i, each in messages.items()}, rests, limit)
        values = {self.rank: own}
        for i, body in bodies.items():
            their_name, values[i] = self._unpack(body)
            if their_name != name:
                raise RuntimeError(
                    f"process {i} is at {their_name!r}, process {self.rank} at {name!r}: all "
                    "processes must do the same."
                )
        self.is_over = False
        return [values[i] for i in range(self.num)]

    def _transfer(
        self, name: str, sent: Mapping[int, Tensor], got: Mapping[int, Tensor], limit: timedelta
    ) -> None:
        """Send bytes to other processes, and receive theirs."""
        works: list[tuple[int, Any]] = []
        i = -1
        try:  # both, as a process may have ended before
            for start, messages in ((self._group.recv, got), (self._group.send, sent)):
                for i, each in messages.items():
                    if len(each):
                        works.append((i, start([each], i, 0)))
            for i, work in works:  # noqa: B007 - an error names it
                work.wait(limit)
        except RuntimeError as error:
            is_late = "timed out" in str(error).lower()
            answer = f"does not answer for {limit.seconds} s" if is_late else "has ended"
            raise RuntimeError(
                f"process {i} {answer}, for which process {self.rank} waits at {name!r}"
            ) from None

    def _body(self, frame: Tensor) -> Tensor:
        """A place for a whole message, with its frame in it."""
        length, _ = LENGTHS.unpack_from(frame.numpy().data)
        body = torch.empty(length, dtype=torch.uint8)
        body[:FRAME] = frame
        return body

    def _pack(self, name: str, value: Any) -> Tensor:
        """A message as bytes: two lengths, the object without its tensors, and those."""
        file = BytesIO()
        pickler = Pickler(file, self.known)
        try:
            pickler.dump((name, value))
        except Exception as error:
            reason = " ".join(str(error).split())
            raise TypeError(
                f"{name} has something that other processes cannot be sent: {reason}"
            ) from error
        text = file.getbuffer()
        start = _aligned(LENGTHS.size + len(text))
        body = torch.empty(max(start + pickler.num_bytes, FRAME), dtype=torch.uint8)
        LENGTHS.pack_into(body.numpy().data, 0, len(body), len(text))
        body.numpy()[LENGTHS.size : LENGTHS.size + len(text)] = text
        for layout, part in pickler.parts.values():
            body[start + layout.start :][: layout.num_bytes] = part
        return body

    def _unpack(self, body: Tensor) -> tuple[str, Any]:
        _, length = LENGTHS.unpack_from(body.numpy().data)
        end = LENGTHS.size + length
        file = BytesIO(body.numpy()[LENGTHS.size : end].tobytes())
        name, value = Unpickler(file, self.known, self.home, body[_aligned(end) :]).load()
        return name, value


class Pickler(pickle.Pickler):
    """Keeps the bytes of tensors apart, in `parts`."""

    def __init__(self, file: Any, known: Sequence[Any]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.num_bytes = 0
        self.number_of = {id(each): number for number, each in enumerate(known)}
        self.parts: dict[int, tuple[Layout, Tensor]] = {}  # by the tensor's id
        self._tensors: list[Tensor] = []  # so that no id is used twice

    def persistent_id(self, value: Any) -> Any:
        if (number := self.number_of.get(id(value))) is not None:
            return number
        if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided:
            return None  # torch's own pickling
        if value.is_complex() or value.is_quantized:
            return None
        if id(value) not in self.parts:
            self._tensors.append(value)
            self.parts[id(value)] = self._take_apart(value.detach(), value.requires_grad)
        return self.parts[id(value)][0]

    def _take_apart(self, tensor: Tensor, requires_grad: bool) -> tuple[Layout, Tensor]:
        order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
        tensor, dims = tensor.permute(order), sorted(range(tensor.ndim), key=order.__getitem__)
        part = tensor.reshape(-1).cpu().view(torch.uint8)
        place = self.num_bytes, len(part), tensor.dtype, list(tensor.shape)
        self.num_bytes += _aligned(len(part) + 1)  # an empty one has a place of its own, too
        return Layout(*place, dims, requires_grad, tensor.is_cpu), part


class Unpickler(pickle.Unpickler):
    """Puts the tensors into an object again. `rest` are the bytes of all."""

    def __init__(self, file: Any, known: Sequence[Any], home: torch.device, rest: Tensor) -> None:
        super().__init__(file)
        self.known, self.home, self.rest = known, home, rest
        self._tensors: dict[int, Tensor] = {}  # by the start of their bytes

    def persistent_load(self, number: Any) -> Any:
        if not isinstance(number, Layout):
            return self.known[number]
        if number.start not in self._tensors:
            part = self.rest[number.start :][: number.num_bytes].view(number.dtype)
            tensor = part.view(number.shape).permute(number.dims)
            tensor = tensor if number.is_on_cpu else tensor.to(self.home)
            self._tensors[number.start] = tensor.requires_grad_(number.requires_grad)
        return self._tensors[number.start]


def _aligned(length: int) -> int:
    return -(-length // ALIGNMENT) * ALIGNMENT
