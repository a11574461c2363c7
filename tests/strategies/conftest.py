"""Functions run in several processes, as torchrun would start them: 0.3 s for each process."""

import importlib.util
import multiprocessing
import os
import pickle
import socket
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "lightning.pytorch", "lightning_mgpu"])


def run_in_processes(k: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """What a function at the top level of a test file returns in each of k processes.

    An exception is returned as `"ValueError: its message"`, and -9 for a process killed by SIGKILL.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = function.__code__.co_filename, function.__name__
    processes, connections = [], []
    for rank in range(k):
        mine, theirs = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(
            target=_call, args=(theirs, rank, k, port, where, args, kwargs), daemon=True
        )
        process.start()
        theirs.close()
        processes.append(process)
        connections.append(mine)
    try:
        results = []
        for process, connection in zip(processes, connections):
            assert connection.poll(90), f"a process hangs: {results}"
            try:
                results.append(pickle.loads(connection.recv_bytes()))
            except EOFError:
                process.join(10)
                results.append(process.exitcode)
        return results
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def _call(
    connection: Connection,
    rank: int,
    k: int,
    port: int,
    where: tuple[str, str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    os.environ.update(
        {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "test"}
    )
    for name, number in {
        "WORLD_SIZE": k,
        "LOCAL_WORLD_SIZE": k,
        "RANK": rank,
        "LOCAL_RANK": rank,
        "GROUP_RANK": 0,
    }.items():
        os.environ[name] = str(number)
    spec = importlib.util.spec_from_file_location("in_process", where[0])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        result = getattr(module, where[1])(*args, **kwargs)
    except BaseException as error:
        if os.environ.get("SHOW"):
            traceback.print_exc()
        result = f"{type(error).__name__}: {error}"
    connection.send_bytes(pickle.dumps(result))  # `send` would share tensors with a dying process
    connection.close()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # the forkserver starts with it
        yield
