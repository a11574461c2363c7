"""Processes that train together send each other messages, all at the same points of a step.

A message is a Python object. Tensors in it travel as they lie in memory. They arrive on the
receiver's device, or on the CPU if they were there. The processes find each other by a store of
torch.distributed. They are not its default group: `dist.is_initialized()` stays False, or metrics
and loggers would add up over processes what each of them has as a whole.

A message is a frame of fixed size, the rest, and large tensors by themselves. In every round each
process sends a frame to every other one, so that an error reaches them wherever they wait.
"""

import pickle
import struct
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from io import BytesIO
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_mgpu.strategies.equality import bytes_of

FRAME = 2**14  # bytes that a message begins with; hardly any has more, except gradients
# the length of frame and rest, of the layouts and of the object in it; whether it is an error
HEAD = struct.Struct("qqq?")
LARGE = 2**18  # bytes of a tensor that is sent from where it lies, without a copy
KNOWN, TENSOR = "known", "tensor"  # what a number in a pickled object stands for
FAILED = "an error"  # the name of the round in which a process fails


class Layout(NamedTuple):
    """A tensor in a message, without its bytes."""

    num_bytes: int
    dtype: torch.dtype
    shape: list[int]  # with the outermost dimension in memory first
    dims: list[int]  # where the tensor's own dimensions are in this shape
    requires_grad: bool
    is_on_cpu: bool


class Message(NamedTuple):
    """An object as bytes: lengths, layouts, the object without its tensors, and those."""

    body: Tensor
    large: list[Tensor]


class Memory:
    """Places for large tensors. One that no tensor uses any more is given out again.

    New memory costs as much time as the message itself: the system fills it page by page.
    """

    def __init__(self) -> None:
        # memory, and the array by which tensors hold it: it lives as long as one of them
        self._places: list[tuple[Tensor, weakref.ref]] = []

    def begin(self) -> None:
        """Forget the places that are in use."""
        self._places = [(memory, user) for memory, user in self._places if user() is None]

    def take(self, num_bytes: int) -> Tensor:
        """A place with any content."""
        for n, (memory, user) in enumerate(self._places):
            if len(memory) == num_bytes and user() is None:
                del self._places[n]
                break
        else:
            memory = torch.empty(num_bytes, dtype=torch.uint8)
        array = memory.numpy()
        self._places.append((memory, weakref.ref(array)))
        return torch.from_numpy(array)


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

    def share(
        self, name: str, value: Any, seconds: float = 0.0, memory: Memory | None = None
    ) -> list[Any]:
        """What every process gives, in order.

        Args:
            name: Where the processes are in the program: the same for all.
            value: May hold tensors, and objects of `known`.
            seconds: How long to wait at least.
            memory: Where large tensors arrive. Left out: in new memory.
        """
        if self.num == 1:
            return [value]
        messages = dict.fromkeys(self._others, self._pack(name, value))
        return self._round(name, value, messages, seconds, memory or Memory())

    def exchange(self, name: str, values: Sequence[Any], memory: Memory | None = None) -> list[Any]:
        """Give `values[i]` to process i, and get what every process gives this one, in order."""
        if self.num == 1:
            return list(values)
        messages = {other: self._pack(name, values[other]) for other in self._others}
        return self._round(name, values[self.rank], messages, 0.0, memory or Memory())

    def fail(self, error: BaseException) -> None:
        """Tell the others of an error, where they wait next or fail, too. Then all is over."""
        if self.num > 1 and not self.is_over:
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:900]  # fits a frame
            with suppress(Exception):
                self.share(FAILED, text)
            self.is_over = True

    def close(self) -> None:
        """Leave the others."""
        self.is_over, self._group = True, None

    def _round(
        self,
        name: str,
        own: Any,
        messages: Mapping[int, Message],
        seconds: float,
        memory: Memory,
    ) -> list[Any]:
        """Send every other process a message and get one from each."""
        if self.is_over:
            raise RuntimeError("The processes of this run have ended: start it again.")
        self.is_over = True  # until all has gone well
        transfer = partial(self._transfer, name, timedelta(seconds=max(seconds, self.seconds)))
        frames = {i: torch.empty(FRAME, dtype=torch.uint8) for i in messages}
        transfer(
            {i: [each.body[:FRAME]] for i, each in messages.items()},
            {i: [frame] for i, frame in frames.items()},
        )
        got = {i: Received(frame) for i, frame in frames.items()}
        for i, each in got.items():
            if each.is_error and name != FAILED:
                raise RuntimeError(f"process {i} has ended with {each.unpack((), self.home)[1]}")
        transfer(
            {i: [each.body[FRAME:]] for i, each in messages.items()},
            {i: [each.body[FRAME:]] for i, each in got.items()},
        )
        transfer(
            {i: each.large for i, each in messages.items()},
            {i: each.make_places(memory) for i, each in got.items()},
        )
        values = {self.rank: own}
        for i, each in got.items():
            their_name, values[i] = each.unpack(self.known, self.home)
            if their_name != name:
                raise RuntimeError(
                    f"process {i} is at {their_name!r}, process {self.rank} at {name!r}: all "
                    "processes must do the same."
                )
        self.is_over = False
        return [values[i] for i in range(self.num)]

    def _transfer(
        self,
        name: str,
        limit: timedelta,
        sent: Mapping[int, Sequence[Tensor]],
        got: Mapping[int, Sequence[Tensor]],
    ) -> None:
        """Send bytes to other processes, and receive theirs."""
        works: list[tuple[int, Any]] = []
        i = -1
        try:  # both, as a process may have ended before
            for start, messages in ((self._group.recv, got), (self._group.send, sent)):
                for i, parts in messages.items():
                    works += [(i, start([part], i, 0)) for part in parts if len(part)]
            for i, work in works:  # noqa: B007 - an error names it
                work.wait(limit)
        except RuntimeError as error:
            is_late = "timed out" in str(error).lower()
            answer = f"does not answer for {limit.seconds} s" if is_late else "has ended"
            raise RuntimeError(
                f"process {i} {answer}, for which process {self.rank} waits at {name!r}"
            ) from None

    def _pack(self, name: str, value: Any) -> Message:
        file = BytesIO()
        pickler = Pickler(file, self.known)
        try:
            pickler.dump((name, value))
        except Exception as error:
            reason = " ".join(str(error).split())
            raise TypeError(
                f"{name} has something that other processes cannot be sent: {reason}"
            ) from error
        layouts = pickle.dumps(pickler.layouts, pickle.HIGHEST_PROTOCOL)
        text = layouts + file.getbuffer()
        start = HEAD.size + len(text)
        small = [part for part in pickler.parts if len(part) < LARGE]
        length = max(start + sum(map(len, small)), FRAME)
        body = torch.empty(length, dtype=torch.uint8)
        lengths = length, len(layouts), len(text) - len(layouts)
        HEAD.pack_into(body.numpy().data, 0, *lengths, name == FAILED)
        body.numpy()[HEAD.size : start] = memoryview(text)
        if small:
            torch.cat(small, out=body[start : start + sum(map(len, small))])
        return Message(body, [part for part in pickler.parts if len(part) >= LARGE])


class Received:
    """A message on its way, of which the frame has come."""

    def __init__(self, frame: Tensor) -> None:
        *self.lengths, self.is_error = HEAD.unpack_from(frame.numpy().data)
        self.body = torch.empty(self.lengths[0], dtype=torch.uint8)
        self.body[:FRAME] = frame
        self.layouts: list[Layout] = []
        self.parts: list[Tensor] = []  # the bytes of each tensor

    def make_places(self, memory: Memory) -> list[Tensor]:
        """The body has come. Returns places for the large tensors."""
        start = HEAD.size
        self.layouts = pickle.loads(self._bytes(start, self.lengths[1]))
        start += self.lengths[1] + self.lengths[2]
        for layout in self.layouts:
            if layout.num_bytes >= LARGE:
                self.parts.append(memory.take(layout.num_bytes))
            else:
                self.parts.append(self.body[start : start + layout.num_bytes].clone())
                start += layout.num_bytes
        return [part for part in self.parts if len(part) >= LARGE]

    def unpack(self, known: Sequence[Any], home: torch.device) -> Any:
        """All has come. Returns the object, every tensor in memory of its own."""
        text = self._bytes(HEAD.size + self.lengths[1], self.lengths[2])
        tensors = [_tensor(layout, part, home) for layout, part in zip(self.layouts, self.parts)]
        return Unpickler(BytesIO(text), known, tensors).load()

    def _bytes(self, start: int, length: int) -> bytes:
        return bytes(self.body.numpy()[start : start + length].data)


class Pickler(pickle.Pickler):
    """Leaves out objects that every process has, and tensors, whose bytes are in `parts`."""

    def __init__(self, file: Any, known: Sequence[Any]) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.number_of = {id(each): (KNOWN, number) for number, each in enumerate(known)}
        self.layouts: list[Layout] = []
        self.parts: list[Tensor] = []
        self._tensors: list[Tensor] = []  # so that no id is used twice

    def persistent_id(self, value: Any) -> Any:
        if (number := self.number_of.get(id(value))) is not None:
            return number
        if type(value) not in (Tensor, nn.Parameter) or value.layout != torch.strided:
            return None  # torch's own pickling
        if value.is_complex() or value.is_quantized:
            return None
        number = self.number_of[id(value)] = TENSOR, len(self._tensors)
        self._tensors.append(value)
        layout, part = _take_apart(value.detach(), value.requires_grad)
        self.layouts.append(layout)
        self.parts.append(part)
        return number


class Unpickler(pickle.Unpickler):
    """Puts known objects and tensors back."""

    def __init__(self, file: Any, known: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        super().__init__(file)
        self.of_kind = {KNOWN: known, TENSOR: tensors}

    def persistent_load(self, number: Any) -> Any:
        kind, i = number
        return self.of_kind[kind][i]


def _take_apart(tensor: Tensor, requires_grad: bool) -> tuple[Layout, Tensor]:
    dims = list(range(tensor.ndim))
    if not tensor.is_contiguous():
        order = sorted(dims, key=tensor.stride, reverse=True)
        tensor, dims = tensor.permute(order), sorted(dims, key=order.__getitem__)
    part = bytes_of(tensor.cpu())
    place = len(part), tensor.dtype, list(tensor.shape)
    return Layout(*place, dims, requires_grad, tensor.is_cpu), part


def _tensor(layout: Layout, part: Tensor, home: torch.device) -> Tensor:
    tensor = part.view(layout.dtype).view(layout.shape).permute(layout.dims)
    tensor = tensor if layout.is_on_cpu else tensor.to(home)
    return tensor.requires_grad_(layout.requires_grad)
