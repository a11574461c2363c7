"""Records an allreduce as a plan: it runs on tensors with a shape and a device, but no values.

*Owner computes*: an operation runs on the device of the tensor that it changes, else of its first
operand. If it reads a tensor on a different device, or if it is `.to(device)`, that is a message.
New tensors on the host are constants, which every process creates.

An operation runs in the first superstep with all its inputs available, and after all reads of the
memory that it overwrites.
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

HOST = torch.device("cpu")  # without an index: tensor i is on cpu:i
SKIPPED = (str(Path(torch.__file__).parent), __file__)
Span = tuple[int, int]  # bytes of a storage, [begin, end)


def record(allreduce: Callable[[list[Tensor]], None], k: int, like: Tensor) -> Plan:
    """Call `allreduce` on k tensors with the shape, strides and dtype of `like`, but no values.

    Raises:
        ValueError: If the function needs values or addresses, moves data to the host, draws random
            numbers, changes the memory of a tensor, or behaves differently in a second call. The
            message names the line.
    """
    plan, again = (Recorder(k, like).run(allreduce) for _ in range(2))
    for number, (step, other) in enumerate(zip_longest(plan.describe(), again.describe())):
        if step != other:
            line = (plan if step else again).steps[number].line
            raise make_error(line, "it behaves differently when it is called again")
    return plan


def make_error(line: str, reason: str) -> ValueError:
    fix = "as_written=false calls the function on gathered gradients"
    return ValueError(f"{line} cannot run as written: {reason}; {fix}")


def summarize(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def find_line(frames: Iterable[Any]) -> str:
    """The line of the recorded function, or of a function that it calls in the same file."""
    called = takewhile(lambda call: call[0].f_code is not Recorder.run.__code__, frames)
    lines = [(frame.f_code.co_filename, number) for frame, number in called]
    lines = [line for line in lines if not line[0].startswith(SKIPPED)] or [("the function", 0)]
    path, number = next(line for line in lines if line[0] == lines[-1][0])
    return f"{path.rpartition('/')[2]}:{number}"


class Range:
    """Bytes of a storage, up to the next range: the supersteps of their last write and read."""

    def __init__(self, begin: int, written: int, read: int) -> None:
        self.begin, self.written, self.read = begin, written, read


class Memory:
    """A storage: its device, and the superstep that creates it."""

    def __init__(self, device: int, made: int, keep: Tensor) -> None:
        self.device, self.made = device, made
        self.keep = keep  # else a new storage could reuse its address
        self.all_ranges = [Range(0, made, made)]

    def ranges(self, span: Span) -> list[Range]:
        """The ranges of a span; ranges are cut at its ends."""
        for at in span:
            i = bisect_right(self.all_ranges, at, key=lambda part: part.begin)
            last = self.all_ranges[i - 1]
            if last.begin != at:
                self.all_ranges.insert(i, Range(at, last.written, last.read))
        begin, end = (bisect_left(self.all_ranges, at, key=lambda part: part.begin) for at in span)
        return self.all_ranges[begin:end]


def find_superstep(made: int, read: list[Any], changed: list[Any]) -> int:
    """The first superstep that can read and change these tensors; registers its accesses."""
    for x in read:
        x.memory.ranges(x.span)
    writes = [part for x in changed for part in x.memory.ranges(x.span)]
    reads = [part for x in read for part in x.memory.ranges(x.span)]
    superstep = made
    superstep = max([superstep, *(part.written for part in reads)])  # read after write
    superstep = max([superstep, *(part.written for part in writes)])  # write after write
    superstep = max([superstep, *(part.read for part in writes)])  # write after read
    for part in reads:
        part.read = max(part.read, superstep)
    for part in writes:
        part.written = superstep
    return superstep


class Recorded(Tensor):
    """A tensor on device `cpu:i`, which wraps a tensor on `meta`."""

    meta: Tensor
    memory: Memory
    span: Span  # from the first to the last element, gaps included
    ref: Ref
    recorder: "Recorder"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder = next(x for x in leaves([*args]) if isinstance(x, Recorded)).recorder
        if func.__name__ == "__set__":
            recorder.reject("it assigns to an attribute of a tensor, such as `data`: use copy_")
        try:  # in inference mode, composite operators would not be decomposed
            with torch._C.DisableTorchFunctionSubclass(), torch.inference_mode(False):
                return func(*args, **kwargs or {})
        except Exception as error:
            reason = f"while it is recorded, tensors have no values or memory ({summarize(error)})"
            recorder.reject(reason)

    @classmethod
    def __torch_dispatch__(cls, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("it runs in another thread, or after the call")


class GivenList(list):
    """The list that is passed to the function."""

    def __setitem__(self, i: Any, value: Any) -> None:
        if value is not self[i]:  # `tensors[i] += X` assigns the same tensor
            self[0].recorder.reject("it rebinds a slot of the list: use tensors[i].copy_(...)")


class Recorder(TorchDispatchMode):
    """Runs operators on `meta`, and records them with their supersteps and messages."""

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
        if self.error:  # the function has caught it
            raise self.error
        return Plan(len(self.devices), self.tensors[0].meta, self.steps)

    def reject(self, reason: str) -> NoReturn:
        self.error = self.error or make_error(self.find_line(), reason)
        raise self.error

    def find_line(self) -> str:
        return find_line(traceback.walk_stack(sys._getframe()))

    def place(self, meta: Tensor, device: int, superstep: int) -> Recorded:
        """Wrap a result: new memory, or a view of recorded memory."""
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
        """Find the device of an operation, or raise an error."""
        kwargs, schema = kwargs or {}, func._schema
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.reject("it draws random numbers")
        if "_foreach_" in schema.name:  # one operation for each element of the lists
            name = schema.name.partition("_foreach_")[2]
            rows = zip(*(x if isinstance(x, (list, tuple)) else repeat(x) for x in args))
            with self:
                results = [getattr(torch.ops.aten, name)(*row, **kwargs) for row in rows]
            return None if name.endswith("_") else results
        values = dict(zip([argument.name for argument in schema.arguments], args)) | kwargs
        inputs = [x for x in leaves(values) if isinstance(x, Recorded)]
        names = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        changed: Any = [x for x in leaves([values.get(n) for n in names]) if isinstance(x, Tensor)]
        if any(x.recorder is not self for x in inputs):
            self.reject("it uses a tensor of an earlier call")
        if not all(isinstance(x, Recorded) for x in changed) and schema.name != "aten::detach_":
            self.reject("it writes to a tensor that is on the host, or from outside")
        if len({x.device for x in changed}) > 1:
            self.reject("it writes to tensors on several devices at once")
        target = values.get("device")
        if not inputs and target in (None, HOST):
            return func(*args, **kwargs)  # a constant
        if target not in (None, *self.devices):
            self.reject(f"it moves data from or to {target}, which is not the device of a tensor")
        device = (changed or inputs)[0].memory.device if target is None else target.index
        return self.note(func, args, kwargs, device, inputs, changed)

    def note(
        self, func: Any, args: Any, kwargs: Any, device: int, inputs: list[Any], changed: list[Any]
    ) -> Any:
        """Run an operation on `meta`, and record it and its messages."""
        schema = func._schema
        is_copy = schema.name == "aten::_to_copy"
        if not is_copy and any(argument.name == "device" for argument in schema.arguments):
            # a factory reads only shapes
            args, kwargs = replace((args, kwargs), lambda x: getattr(x, "meta", x))
            kwargs, inputs = {**kwargs, "device": self.devices[device]}, []
        local = {id(x): self.move(x, device) for x in inputs}
        args, kwargs = replace((args, kwargs), lambda x: local.get(id(x), x))
        meta_args, meta_kwargs = replace((args, kwargs), to_meta)
        metas = func(*meta_args, **meta_kwargs)
        if is_copy and inputs:
            received = local[id(inputs[0])]
            if received is not inputs[0] and layout_of(received) == layout_of(metas):
                return received  # the message is the copy
        if schema.name == "aten::set_" or any(layout_of(x) != layout_of(x.meta) for x in changed):
            self.reject("it changes the shape or memory of a tensor")
        is_view = not changed and any(result.alias_info for result in schema.returns)
        read = [] if is_view else [x for x in local.values() if all(x is not y for y in changed)]
        made = max((x.memory.made for x in local.values()), default=0)
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

    def move(self, x: Recorded, target: int) -> Recorded:
        """The tensor on the target device: itself, or received by a message."""
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
