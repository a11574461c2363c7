"""Which messages an allreduce sends, and when. It runs once, on tensors without numbers.

An exchange runs on numbers, and tells how far it is from the exact sum, too.

*Owner computes*: an operation runs on the device of the tensor that it changes, else on that of its
first operand. A tensor of another device that it reads is a message, with the bytes that it has; so
is `.to(device)`. New memory belongs to the device it is made on. Any device but the k is the host.
A message takes the first round in which its data is there, its source sends nothing else, and its
target receives nothing else.
"""

import math
import traceback
from collections.abc import Callable
from inspect import isgeneratorfunction
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

HOST = torch.device("cpu")
NUM_STEPS = 64  # of an exchange
Part = tuple[int, int]  # of a memory: the first byte, and the first one after it


class Message(NamedTuple):
    source: int
    target: int
    nbytes: int
    round: int  # from 1


class Trace:
    """The messages of one call on k tensors of `nbytes` each. Device k is the host."""

    def __init__(self, k: int, nbytes: int) -> None:
        self.k, self.nbytes, self.num_rounds = k, nbytes, 0
        self.sent, self.received = [0] * (k + 1), [0] * (k + 1)  # bytes by device
        self.messages: list[Message] = []
        self.errors: list[float] = []  # relative, of an exchange's results: of their sum so far
        self._busy: set[tuple[str, int, int]] = set()

    def send(self, source: int, target: int, nbytes: int, ready: int) -> int:
        """Add a message whose data is there after round `ready`; returns the round it takes."""
        number = ready + 1
        while {("sends", source, number), ("gets", target, number)} & self._busy:
            number += 1
        self._busy |= {("sends", source, number), ("gets", target, number)}
        self.messages.append(Message(source, target, nbytes, number))
        self.sent[source] += nbytes
        self.received[target] += nbytes
        self.num_rounds = max(number, self.num_rounds)
        return number

    def milliseconds(self, latency: float, bandwidth: float) -> float:
        """Computed: a round lasts as long as its largest message, and sums take no time."""
        largest: dict[int, int] = {}
        for message in self.messages:
            largest[message.round] = max(message.nbytes, largest.get(message.round, 0))
        return 1000 * sum(latency + nbytes / bandwidth for nbytes in largest.values())


def trace(function: Callable, k: int, numel: int) -> Trace:
    """Run an allreduce or an exchange as it is; a ValueError names the line that needs numbers."""
    if isgeneratorfunction(function):
        return trace_exchange(function, k, numel)
    recorder = Recorder(Trace(k, 4 * numel))
    meta = [torch.empty(numel, device="meta") for _ in range(k)]
    tensors = [recorder.wrap(*pair) for pair in zip(meta, recorder.devices)]
    try:
        with torch.no_grad(), recorder:
            function(tensors)
    except Exception as error:
        frames, torchs = traceback.extract_tb(error.__traceback__), str(Path(torch.__file__).parent)
        users = [f for f in frames if f.filename != __file__ and torchs not in f.filename]
        at = (users or frames)[-1]
        raise ValueError(
            f"cannot trace {Path(at.filename).name}:{at.lineno}, `{at.line}`: tensors have shapes "
            f"and devices here, but no numbers ({' '.join(str(error).split())[:120]})"
        ) from error
    return recorder.trace


def trace_exchange(exchange: Callable, k: int, numel: int) -> Trace:
    """Run a generator function on k small random matrices: a `yield` goes from each to all.

    The messages are those of the first step. All steps get the same numbers.
    """

    def endless(step: Any) -> Any:
        results.append((yield from step))
        while True:
            yield ()

    names = {"name": "weight", "num_replicas": k, "seed": 0}
    states = [type("State", (dict,), names | {"replica": replica})() for replica in range(k)]
    side, generator = math.isqrt(min(numel, 2**16)), torch.Generator().manual_seed(0)
    Xs = torch.randn(k, side, side, generator=generator)
    result, total = Trace(k, 4 * side * side), torch.zeros(side, side).double()
    for number in range(1, NUM_STEPS + 1):
        results: list[Tensor] = []
        steps = [endless(exchange(*pair)) for pair in zip(Xs.clone(), states)]
        sent = [step.send(None) for step in steps]
        while (sizes := [sum(t.nbytes for t in tree_leaves(each)) for each in sent])[0]:
            for shift in range(1, k) if number == 1 else ():  # in a round, all send and receive
                for i, nbytes in enumerate(sizes):
                    result.send(i, (i + shift) % k, nbytes, ready=0)
            sent = [step.send(sent) for step in steps]
        total += results[0]
        exact = number * Xs.sum(0).double()
        result.errors.append(float((total - exact).norm() / exact.norm()))
    return result


class Located(Tensor):
    """A tensor on device `meta:i`, or on the host. Inside is a meta tensor."""

    meta: Tensor
    written: dict[Part, int]  # after which round a part of its memory is there
    part: Part  # from its first to its last number, holes included
    __torch_dispatch__: Any = None  # the recorder runs all operations


class Recorder(TorchDispatchMode):
    """Runs torch's operations on meta tensors, and adds the messages that they need to `trace`."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace
        self.devices = [*(torch.device("meta", i) for i in range(trace.k)), HOST]
        # by a storage's address, which is its own as long as the tensor is kept
        self.memories: dict[int, tuple[torch.device, dict[Part, int], Tensor]] = {}

    def wrap(self, x: Tensor, device: torch.device, round: int = 0) -> Located:
        """A tensor in new memory, written in `round`; or a view of memory that is known."""
        new = device, {(0, x.nbytes): round}, x
        device, written, _ = self.memories.setdefault(x.untyped_storage()._cdata, new)
        layout = (x.size(), x.stride(), x.storage_offset())
        y: Located = Tensor._make_wrapper_subclass(Located, *layout, dtype=x.dtype, device=device)
        begin: Any = x.storage_offset()
        end = begin + 1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride()))
        y.meta, y.written, y.part = x, written, (begin * x.itemsize, end * x.itemsize)
        return y

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, schema = kwargs or {}, func._schema
        if "_foreach_" in schema.name:  # one operation per element of the lists
            name = schema.name.partition("_foreach_")[2]
            rows = zip(*(a if isinstance(a, (list, tuple)) else repeat(a) for a in args))
            with self:
                results = [getattr(torch.ops.aten, name)(*row, **kwargs) for row in rows]
            return None if name.endswith("_") else results
        names = [argument.name for argument in schema.arguments]
        given = dict(zip(names, args)) | kwargs
        inputs = [x for x in tree_leaves(given) if isinstance(x, Located)]
        if not inputs and "device" not in names:
            return func(*args, **kwargs)  # a constant, which every device has
        writes = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
        changed = tree_leaves([given[name] for name in writes])
        owners = [x.device for x in (*changed, *inputs)] or [HOST]
        device = given.get("device") or owners[0]
        is_filled = "device" in names and schema.name != "aten::_to_copy"
        reads = [] if is_filled else inputs  # empty_like and its like read no numbers
        ready = max((self.bring(x, device) for x in reads), default=0)
        for x in changed:
            x.written[x.part] = ready
        meta_args, meta_kwargs = tree_map_only(Located, lambda x: x.meta, (args, kwargs))
        meta_kwargs |= {"device": "meta"} if "device" in names else {}
        result = func(*meta_args, **meta_kwargs)
        return tree_map_only(Tensor, lambda x: self.wrap(x, device, ready), result)

    def bring(self, x: Located, device: torch.device) -> int:
        """Send a tensor that lives elsewhere; returns after which round the device has it."""
        begin, end = x.part
        written = (r for (b, e), r in x.written.items() if b < end and begin < e)
        ready = max(written, default=0)
        if x.device == device or not x.numel():
            return ready
        source, target = map(self.devices.index, (x.device, device))
        return self.trace.send(source, target, x.nbytes, ready)
