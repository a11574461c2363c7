"""torch.distributed's allreduce between k processes on this machine: gloo, or NCCL where there are k GPUs.

`measure_processes` starts this file as a process of its own, which forks the k ranks before torch has started any
thread, and writes a line of JSON for each size.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_mgpu.benchmark.cores import free_memory, num_cores
from lightning_mgpu.benchmark.exchange_report import result
from lightning_mgpu.runs.processes import process_group


def measure_processes(
    sizes: Sequence[int],
    ks: Sequence[int],
    seconds: float,
    *,
    timeout: float = 300.0,
    progress: Callable[[str], None] = lambda what: None,
) -> list[dict[str, Any]]:
    """Rows as `measure_exchange` gives them, for `gloo` or `nccl`; a run's time is that of its slowest process.

    Args:
        sizes: Bytes a process.
        timeout: Seconds for all sizes of one k; then its processes are ended, and what is missing says so.
    """
    rows: list[dict[str, Any]] = []
    for k in ks:
        name = "nccl" if torch.cuda.device_count() >= k else "gloo"
        devices = [torch.device("cuda", 0) if name == "nccl" else torch.device("cpu")]
        needed = {size: (1 if name == "nccl" else 3 * k) * size for size in sizes}  # gloo has buffers of its own
        half = free_memory(devices) / 2
        fitting = [size for size in sizes if needed[size] <= half]
        progress(f"k = {k}, {name} between {k} processes")
        times, error = _start(name, k, fitting, seconds, timeout) if fitting else ({}, "")
        for size in sizes:
            if size in times:
                rows.append(result(name, k, size, times[size]))
            else:
                why = error if size in fitting else f"needs {needed[size] >> 20} MiB, more than half of what is free"
                rows.append({"algorithm": name, "k": k, "bytes": size, "skipped": why})
    return rows


def _start(
    backend: str, k: int, sizes: Sequence[int], seconds: float, timeout: float
) -> tuple[dict[int, list[float]], str]:
    """The times of every size, and why some are missing."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        command = [sys.executable, "-m", __name__, backend, str(k), str(seconds), *map(str, sizes)]
        error = ""
        with process_group(command, stdout=out, stderr=err) as process:
            try:
                if process.wait(timeout) != 0:
                    error = "failed"
            except subprocess.TimeoutExpired:
                error = f"not done after {timeout:g} s"
        out.seek(0)
        err.seek(0)
        whole = [line for line in out if line.startswith("{") and line.endswith("\n")]  # older gloos print lines, too
        times = {int(size): t for line in whole for size, t in json.loads(line).items()}
        if error == "failed":
            last = [line for line in err.read().splitlines() if line.strip()][-1:]
            error = f"failed: {''.join(last)[:200]}"
    return times, error


def _rank(rank: int, backend: str, k: int, seconds: float, sizes: list[int], meeting_point: str) -> None:
    torch.set_num_threads(max(1, num_cores() // k))
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=f"file://{meeting_point}", rank=rank, world_size=k)
    for num_bytes in sizes:
        tensor = torch.zeros(num_bytes // 4, device=device)
        _time(tensor, 1)  # warm-up
        guess = torch.tensor(_time(tensor, 3), dtype=torch.float64, device=device).median()
        dist.broadcast(guess, 0)  # all must make as many runs
        times = _time(tensor, min(max(int(seconds / guess.item()), 3), 10_000))
        slowest = torch.tensor(times, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if rank == 0:
            print(json.dumps({num_bytes: slowest.tolist()}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _time(tensor: torch.Tensor, runs: int) -> list[float]:
    times = []
    for _ in range(runs):
        dist.barrier()
        if tensor.is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        dist.all_reduce(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times


def _main(backend: str, k: str, seconds: str, *sizes: str) -> None:
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else the host's name must resolve
    method = "fork" if sys.platform == "linux" and backend == "gloo" else "spawn"  # forked ranks need no new import
    with tempfile.TemporaryDirectory() as folder:
        arguments = (backend, int(k), float(seconds), list(map(int, sizes)), os.path.join(folder, "meeting_point"))
        mp.start_processes(_rank, arguments, nprocs=int(k), start_method=method)


if __name__ == "__main__":
    _main(*sys.argv[1:])
