"""Records an allreduce as a plan: it runs on tensors with a shape and a device, but no values.

*Owner computes*: an operation runs on the device of the tensor that it changes, else on that of its
first operand. A tensor of another device that it reads is a message, and so is `.to(device)`. New
tensors on the host are constants, which every process has.

An operation runs in the first superstep in which everything that it reads is there, and everything
that it overwrites has been read.
"""

import sys
import traceback
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from itertools import repeat, takewhile, zip_longest
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_mgpu.allreduce.plan import (
    Constant,
    Message,
    Operation,
    Plan,
    Ref,
    layout_of,
    leaves,
    replace,
)

HOST = torch.device("cpu")  # without an index: that of tensor i is cpu:i
SKIPPED = (str(Path(torch.__file__).parent), __file__)
Span = tuple[int, int]  # bytes of a storage: the first one, and the first one after them


def record(allreduce: Callable[[list[Tensor]], None], k: int, like: Tensor) -> Plan:
    """Call `allreduce` on k tensors with the shape, strides and dtype of `like`, but no values.

    Raises:
        ValueError: One line that names the line of the function, if it needs values or addresses,
            moves data to the host, draws random numbers, gives a tensor other memory, or does
            something else when it is called again.
    """
    plan, again = (Recorder(k, like).run(allreduce) for _ in range(2))
    for number, (step, other) in enumerate(zip_longest(plan.describe(), again.describe())):
        if step != other:
            line = (plan if step else again).steps[number].line
            raise make_error(line, "it does something else when it is called again")
    return plan


def make_error(line: str, reason: str) -> ValueError:
    fix = "as_written=false calls the function on gathered gradients"
    return ValueError(f"{line} cannot run as written: {reason}; {fix}")


def summarize(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def find_line(frames: Iterable[Any]) -> str:
    """The line of the recorded function, or of another function of its file that it calls."""
    called = takewhile(lambda each: each[0].f_code is not Recorder.run.__code__, frames)
    lines = [(frame.f_code.co_filename, number) for frame, number in called]
    lines = [line for line in lines if not line[0].startswith(SKIPPED)] or [("the function", 0)]
    path, number = next(line for line in lines if line[0] == lines[-1][0])
    return f"{path.rpartition('/')[2]}:{number}"


class Range:
    """Bytes of a storage, up to the next range: the supersteps of their last write and read."""

    def __init__(self, begin: int, written: int, read: int) -> None:
        self.begin, self.written, self.read = begin, written, read


class Memory:
    """A storage: the device that it is on, and in which superstep it was made."""

    def __init__(self, device: int, made: int, keep: Tensor) -> None:
        self.device, self.made = device, made
        self.keep = keep  # else another storage could get its address
        self.all_ranges = [Range(0, made, made)]

    def ranges(self, span: Span) -> list[Range]:
        """The ranges of a span, which are cut at its ends."""
        for at in span:
            i = bisect_right(self.all_ranges, at, key=lambda each: each.begin)
            last = self.all_ranges[i - 1]
            if last.begin != at:
                self.all_ranges.insert(i, Range(at, last.written, last.read))
        begin, end = (bisect_left(self.all_ranges, at, key=lambda each: each.begin) for at in span)
        return self.all_ranges[begin:end]


def find_superstep(made: int, read: list[Any], changed: list[Any]) -> int:
    """The first superstep in which tensors can be read and changed. From now on they are."""
    for x in read:
        x.memory.ranges(x.span)
    writes = [each for x in changed for each in x.memory.ranges(x.span)]
    reads = [each for x in read for each in x.memory.ranges(x.span)]
    superstep = made
    superstep = max([superstep, *(each.written for each in reads)])  # read after write
    superstep = max([superstep, *(each.written for each in writes)])  # write after write
    superstep = max([superstep, *(each.read for each in writes)])  # write after read
    for each in reads:
        each.read = max(each.read, superstep)
    for each in writes:
        each.written = superstep
    return superstep


class Recorded(Tensor):
    """A tensor on device `cpu:i`. Inside is a tensor on `meta`."""

    meta: Tensor
    memory: Memory
    span: Span  # from its first to its last element, holes included
    ref: Ref
    recorder: "Recorder"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder = next(x for x in leaves([*args]) if isinstance(x, Recorded)).recorder
        if func.__name__ == "__set__":
            recorder.refuse("it assigns to an attribute of a tensor, such as `data`: use copy_")
        try:  # in inference mode, composite operators would arrive in one piece
            with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False):
                return func(*args, **kwargs or {})
        except Exception as error:
            reason = f"while it is recorded, tensors have no values or memory ({summarize(error)})"
            recorder.refuse(reason)

    @classmethod
    def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("it runs in another thread, or after the call")


class GivenList(list):
    """The list that the function gets."""

    def __setitem__(self, i: Any, value: Any) -> None:
        if value is not self[i]:  # which it is after `tensors[i] += X`
            self[0].recorder.refuse("it gives the list another tensor: use tensors[i].copy_(...)")


class Recorder(TorchDispatchMode):
    """Runs operators on `meta`, and notes them with their supersteps and messages."""

    def __init__(self, k: int, like: Tensor) -> None:
        super().__init__()
        self.devices = [torch.device("cpu", i) for i in range(k)]
        self.memories: dict[int, Memory] = {}  # by the address of the storage
        self.ends: dict[Any, int] = {}  # of the messages of a superstep, by source and target
        self.steps: list[Operation | Message] = []
        self.error: ValueError | None = None
        self.count = 0
        shape, stride, dtype = layout_of(like)
        metas = [torch.empty_strided(shape, stride, dtype=dtype, device="meta") for _ in range(k)]
        self.tensors = GivenList(self.place(meta, i, 0) for i, meta in enumerate(metas))

    def run(self, allreduce: Callable[[list[Tensor]], None]) -> Plan:
        try:
            with torch.no_grad(), self:
                allreduce(self.tensors)
        except Exception as error:
            line = find_line(reversed([*traceback.walk_tb(error.__traceback__)]))
            raise self.error or make_error(line, f"it raises {summarize(error)}") from error
        if self.error:  # which the function has caught
            raise self.error
        return Plan(len(self.devices), self.tensors[0].meta, self.steps)

    def refuse(self, reason: str) -> NoReturn:
        self.error = self.error or make_error(self.find_line(), reason)
        raise self.error

    def find_line(self) -> str:
        return find_line(traceback.walk_stack(sys._getframe()))

    def place(self, meta: Tensor, device: int, superstep: int) -> Recorded:
        """A result: new memory, or a view of memory that is known."""
        address, begin = meta.untyped_storage()._cdata, int(meta.storage_offset())
        memory = self.memories.setdefault(address, Memory(device, superstep, meta))
        make: Any = Tensor._make_wrapper_subclass
        layout = {"strides": meta.stride(), "storage_offset": begin, "dtype": meta.dtype}
        x = make(Recorded, meta.shape, **layout, device=self.devices[memory.device])
        torch._C._set_throw_on_mutable_data_ptr(x)
        last = begin + sum((n - 1) * stride for n, stride in zip(meta.shape, meta.stride()))
        end = last + 1 if meta.numel() else begin
        x.meta, x.memory, x.recorder, x.ref = meta, memory, self, Ref(self.count)
        x.span = begin * meta.itemsize, end * meta.itemsize
        self.count += 1
        return x

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Find the device of an operation, or refuse it."""
        kwargs, schema = kwargs or {}, func._schema
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.refuse("it draws random numbers")
        if "_foreach_" in schema.name:  # one operation for each element of the lists
            name = schema.name.partition("_foreach_")[2]
            rows = zip(*(x if isinstance(x, (list, tuple)) else repeat(x) for x in args))
            with self:
                results = [getattr(torch.ops.aten, name)(*row, **kwargs) for row in rows]
            return None if name.endswith("_") else results
        given = dict(zip([argument.name for argument in schema.arguments], args)) | kwargs
        inputs = [x for x in leaves(given) if isinstance(x, Recorded)]
        names = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        changed: Any = [x for x in leaves([given.get(n) for n in names]) if isinstance(x, Tensor)]
        if any(x.recorder is not self for x in inputs):
            self.refuse("it uses a tensor of an earlier call")
        if not all(isinstance(x, Recorded) for x in changed) and schema.name != "aten::detach_":
            self.refuse("it writes into a tensor on the host, or from outside")
        if len({x.device for x in changed}) > 1:
            self.refuse("it writes into tensors of several devices at once")
        wanted = given.get("device")
        if not inputs and wanted in (None, HOST):
            return func(*args, **kwargs)  # a constant
        if wanted not in (None, *self.devices):
            self.refuse(f"it moves data from or to {wanted}, which is not a tensor's device")
        device = (changed or inputs)[0].memory.device if wanted is None else wanted.index
        return self.note(func, args, kwargs, device, inputs, changed)

    def note(
        self, func: Any, args: Any, kwargs: Any, device: int, inputs: list[Any], changed: list[Any]
    ) -> Any:
        """Run an operation on `meta`, and note it and its messages."""
        schema = func._schema
        is_copy = schema.name == "aten::_to_copy"
        if not is_copy and any(argument.name == "device" for argument in schema.arguments):
            # a factory reads shapes, and no values
            args, kwargs = replace((args, kwargs), lambda x: getattr(x, "meta", x))
            kwargs, inputs = {**kwargs, "device": self.devices[device]}, []
        here = {id(x): self.bring(x, device) for x in inputs}
        args, kwargs = replace((args, kwargs), lambda x: here.get(id(x), x))
        meta_args, meta_kwargs = replace((args, kwargs), to_meta)
        metas = func(*meta_args, **meta_kwargs)
        if is_copy and inputs:
            received = here[id(inputs[0])]
            if received is not inputs[0] and layout_of(received) == layout_of(metas):
                return received  # the message is the copy
        if schema.name == "aten::set_" or any(layout_of(x) != layout_of(x.meta) for x in changed):
            self.refuse("it gives a tensor another shape or memory")
        is_view = not changed and any(each.alias_info for each in schema.returns)
        read = [] if is_view else [x for x in here.values() if all(x is not y for y in changed)]
        made = max((x.memory.made for x in here.values()), default=0)
        superstep = find_superstep(made, read, changed)
        known = {id(x.meta): x for x in changed}

        def place(meta: Any) -> Any:
            if id(meta) in known or not isinstance(meta, Tensor):
                return known.get(id(meta), meta)
            return self.place(meta, device, superstep)

        results = replace(metas, place)
        args, kwargs, refs = replace((args, kwargs, results), to_ref)
        if changed or any(isinstance(ref, Ref) for ref in leaves(refs)):
            line = self.find_line()
            self.steps.append(Operation(device, superstep, func, args, kwargs, refs, line))
        return results

    def bring(self, x: Recorded, target: int) -> Recorded:
        """The tensor on a device: itself, or a message's."""
        source = x.memory.device
        if source == target:
            return x
        like = torch.empty_like(x.meta)
        if not x.numel():  # nothing is sent
            with self:
                empty: Any = torch.empty_like(like, device=self.devices[target])
            return empty
        superstep = find_superstep(x.memory.made, [x], [])
        y = self.place(like, target, superstep + 1)
        end = self.ends.get((source, target, superstep), 0)
        begin = -(-end // x.itemsize) * x.itemsize
        self.ends[source, target, superstep] = begin + x.nbytes
        route = source, target, superstep
        self.steps.append(Message(*route, like, begin, x.ref, y.ref, self.find_line()))
        return y


def to_meta(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.meta if isinstance(x, Recorded) else x.to("meta")
    return torch.device("meta") if isinstance(x, torch.device) else x


def to_ref(x: Any) -> Any:
    if isinstance(x, Recorded):
        return x.ref
    return Constant(x) if isinstance(x, Tensor) and not x.is_meta else x
