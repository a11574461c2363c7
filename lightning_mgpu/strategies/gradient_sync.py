"""Sums the gradients of an optimizer step over all replicas, with one control message."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_mgpu.distributed.comm.buckets import Bucket, Gradients
from lightning_mgpu.distributed.comm.reducer import BucketReducer, SyncBucket
from lightning_mgpu.distributed.comm.schedules import all_gather_bytes
from lightning_mgpu.distributed.comm.transport import Transport
from lightning_mgpu.distributed.processes.consistency import ConsistencyCheck, crc_of
from lightning_mgpu.distributed.processes.control_plane import ControlPlane
from lightning_mgpu.distributed.processes.failures import drop_group
from lightning_mgpu.strategies.buffers import read_buffers, write_buffers

BUFFERS, CONTROL = "buffers", "control message"  # keys of their message schedules


class GradientSync:
    """Synchronizes the gradients and buffers of one `fit`, in a separate process group.

    Args:
        module: Its parameters may change between optimizer steps.
        control: Exchanges control messages.
        consistency: Packs and verifies the invariants in them.
        sync_bucket: Returns the message schedule of a bucket.
        prepare_buckets: Called with new buckets, before their first messages. Returns a checksum
            that must be identical in all processes.
        is_elementwise: Whether the allreduce may be called on slices of a bucket.
        cap: Bucket size in bytes; 0 means one bucket per dtype.
        in_memory: Whether gradients are summed in shared memory, if available.
        device: The module's device. GPUs send after the control message: if one process failed
            before it, the others would hang in an NCCL kernel.
        overlaps: Whether communication overlaps the backward pass.
    """

    found_nonfinite = False  # whether a message schedule of any rank replaced non-finite values

    def __init__(
        self,
        module: nn.Module,
        control: ControlPlane,
        consistency: ConsistencyCheck,
        sync_bucket: SyncBucket,
        prepare_buckets: Callable[[Sequence[Bucket]], int],
        *,
        is_elementwise: bool,
        cap: float,
        in_memory: bool,
        device: torch.device,
        overlaps: bool,
    ) -> None:
        self.module, self.control, self.consistency = module, control, consistency
        self.waits, self.overlaps = device.type != "cpu", overlaps and cap > 0
        timeout = timedelta(seconds=2 * control.timeout)
        self.group = dist.new_group(timeout=timeout) if control.size > 1 else None
        self.transport = Transport(control, self.group, device.type)
        args = cap, self.transport, sync_bucket, is_elementwise, in_memory
        self._make_reducer = lambda layout: BucketReducer(layout, *args)
        self._prepare_buckets = prepare_buckets
        self._reducer: Any = None  # the `BucketReducer` of the current layout
        self.layout: dict[Tensor, Any] = {}
        self.num_buffer_bytes = sum(b.nbytes for b in module.buffers())

    def reduce(
        self, gradients: Gradients, purpose: str, invariants: Mapping[str, int], buffers: bool
    ) -> Gradients:
        """Sum gradients over all replicas.

        Args:
            gradients: Local gradients. Buckets not sent during the backward pass are sent now.
            purpose: Name of the control message.
            invariants: Values that it verifies, by name, in addition to the parameters.
            buffers: Whether the module's buffers are also synchronized.

        Returns:
            The sums, for parameters with a gradient in at least one replica.
        """
        with self.control.span("sums"):
            while True:
                row = self._start(gradients, invariants, buffers)
                flags = self._read_flags(self.control.all_gather(row, purpose))
                if not flags[0]:
                    sums = self._take_sums(self._reducer.finish(gradients), flags)
                    return sums | {p: g for p, g in gradients.items() if not p.numel()}
                self._reducer.finish({})  # a hook edited gradients that were in flight

    def send(self, gradients: Gradients, invariants: Mapping[str, int]) -> None:
        """Send gradients and a control message without waiting. `receive` returns the sums."""
        row = torch.from_numpy(self._start(gradients, invariants))
        self.transport.start(CONTROL, all_gather_bytes(row, self.control.size))

    def receive(self) -> Gradients:
        """Wait for the sums of the gradients that `send` has sent."""
        results = self._reducer.finish({})
        return self._take_sums(results, self._read_flags(results[CONTROL].numpy()))

    def _start(
        self, gradients: Gradients, invariants: Mapping[str, int], buffers: bool = False
    ) -> np.ndarray:
        """Send the remaining gradients. Returns the control message."""
        self.prepare()
        for p, g in gradients.items():
            if g.layout != torch.strided:
                raise MisconfigurationException("Sparse gradients: use nn.Embedding(sparse=False).")
            if g.dtype != p.dtype:
                raise MisconfigurationException(
                    f"A {g.dtype} gradient of a {p.dtype} parameter is not supported: do not set "
                    "`grad_dtype`."
                )
        reducer, layout = self._reducer, self._reducer.layout
        is_edited = reducer.is_edited(gradients)
        reducer.start_rest(gradients, self.waits)
        if buffers and self.num_buffer_bytes:
            self._start_buffers()
        found_nonfinite = any(bucket.found_nonfinite for bucket in reducer.buckets)
        payload = np.packbits([is_edited, found_nonfinite, *(p in gradients for p in layout)])
        trained = crc_of([p.requires_grad for p in layout])
        return self.consistency.pack({"parameters": trained, **invariants}, payload)

    def _read_flags(self, rows: np.ndarray) -> list[bool]:
        """Flags of any process: edited, non-finite, and one per parameter with a gradient."""
        payloads: Any = self.consistency.verify(rows)
        flags: Any = np.unpackbits(payloads, axis=1, count=2 + len(self._reducer.layout))
        return flags.any(axis=0).tolist()

    def _take_sums(self, results: dict[Any, Any], flags: list[bool]) -> Gradients:
        _, self.found_nonfinite, *has_gradient = flags
        if BUFFERS in results:
            write_buffers(self.module, results[BUFFERS])
        buckets, layout = self._reducer.buckets, self._reducer.layout
        sums = {p: X for bucket in buckets for p, X in zip(bucket.parameters, results[bucket])}
        return {p: sums[p] for p, is_present in zip(layout, has_gradient) if is_present}

    def sync_buffers(self) -> None:
        """Synchronize the module's buffers separately from gradients."""
        if self.num_buffer_bytes and self.control.size > 1:
            self._start_buffers()
            self.control.all_gather(np.zeros(1, np.uint8), BUFFERS)
            write_buffers(self.module, self.transport.finish()[BUFFERS])

    def _start_buffers(self) -> None:
        """Buffers follow the control message: gloo aborts if processes send different messages."""
        row = read_buffers(self.module, self.num_buffer_bytes)
        self.transport.start(BUFFERS, all_gather_bytes(row, self.control.size), waits=True)

    def prepare(self) -> None:
        """Create new buckets if parameters have changed since the last optimizer step.

        Raises:
            RuntimeError: If processes have different parameters, or different plans for them.
        """
        layout = self.get_layout()
        if self._reducer is None or self._reducer.layout != layout:
            if self._reducer is not None and self._reducer.num_started:
                raise RuntimeError("`requires_grad` must not change during a backward pass.")
            row = self.consistency.pack({"parameters": crc_of([*layout.values()])})
            self.consistency.verify(self.control.all_gather(row, "new parameters"))
            self.transport.memory.clear()
            self._reducer = self._make_reducer(layout)
            row = self.consistency.pack({"plans": self._prepare_buckets(self._reducer.buckets)})
            self.consistency.verify(self.control.all_gather(row, "new buckets"))

    @contextmanager
    def during_backward(self) -> Iterator[None]:
        """In this context, a backward pass sends each bucket as soon as its gradients are ready.

        Nothing is sent early in the first optimizer step, or after parameters have changed.
        """
        reducer = self._reducer if self.overlaps else None
        if reducer is None or not reducer.sends_messages or reducer.layout != self.get_layout():
            yield
        else:
            with reducer.overlapping_backward():
                yield

    def get_layout(self) -> dict[Tensor, Any]:
        """Parameters that require gradients, or did before, with name, dtype, shape and strides."""
        self.layout = {
            p: (name, p.dtype, p.shape, p.stride())
            for name, p in self.module.named_parameters()
            if p.numel() and (p.requires_grad or p.grad is not None or p in self.layout)
        }
        return self.layout

    def close(self, is_interrupted: bool) -> None:
        drop_group(self.group, is_interrupted)
