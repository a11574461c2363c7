"""Functions run in several processes, as torchrun would start them, and a small model to train.

A process takes 0.3 s to start, and a `fit` 0.1 s: most tests share a group of processes.
"""

import multiprocessing
import os
import pickle
import socket
import sys
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_mgpu.distributed.processes.control_plane import ControlPlane
from lightning_mgpu.strategies import ManualAllreduceStrategy, manual_allreduce

IN_MEMORY = "BY_MESSAGES" not in os.environ
if not IN_MEMORY:  # as between machines, and with one parameter per bucket
    ControlPlane.map_memory = lambda *_: None
    manual_allreduce.BUCKET_CAP_MB = 1e-9
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "lightning.pytorch", "lightning_mgpu"])
OFF = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
QUIET = {**dict.fromkeys(OFF, False), "num_sanity_val_steps": 0, "accelerator": "cpu"}


def world_size():
    """Of the processes that run this."""
    return int(os.environ.get("WORLD_SIZE", 1))


def rank():
    return int(os.environ.get("RANK", 0))


def samples(num=57, seed=1):
    """X (N, 8) in float64 and classes (N,). The last of six batches of 10 has 7 samples."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(num, 8, generator=generator, dtype=torch.float64)
    return TensorDataset(X, torch.randint(0, 3, (num,), generator=generator))


class Net(LightningModule):
    """Tests override its methods."""

    def __init__(self, net=None):
        super().__init__()
        self.net = net or nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))

    def loss(self, batch):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def make_strategy(seconds=20, **kwargs):
    return ManualAllreduceStrategy(timeout=timedelta(seconds=seconds), **kwargs)


def new_control_plane(seconds=10):
    """Of all processes that run this, without a Trainer."""
    group, trainer = None, SimpleNamespace(received_sigterm=False, interrupted=False)
    if world_size() > 1:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        group = dist.group.WORLD
    return ControlPlane(rank(), world_size(), group, seconds, trainer)


def new_trainer(**kwargs):
    """A Trainer of all processes that run this. For one process its strategy is `auto`."""
    strategy = make_strategy() if world_size() > 1 else "auto"
    given = {"strategy": strategy, "devices": world_size(), "max_epochs": 2, **kwargs}
    return Trainer(**{**QUIET, **given})


def fit(
    make=Net,
    data=None,
    val=None,
    ckpt_path=None,
    **kwargs,
):
    """The trained module's state, and what was logged. Without processes: one device.

    `data`: a loader, or a function of the Trainer that makes one.
    """
    seed_everything(0, verbose=False)
    trainer, module = new_trainer(**{"precision": "64-true", **kwargs}), make()
    data = DataLoader(samples(), 10, shuffle=True) if data is None else data
    data = data(trainer) if callable(data) else data
    trainer.fit(module, data, val, ckpt_path=ckpt_path, weights_only=False)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    return state, {name: float(value) for name, value in trainer.callback_metrics.items()}


@contextmanager
def no_shared_memory(is_one_machine=False):
    """As between machines, or in one machine that has no memory to share."""
    with (
        mock.patch.object(ManualAllreduceStrategy, "is_one_machine", is_one_machine),
        mock.patch.object(ControlPlane, "map_memory", return_value=None),
    ):
        yield


def attempt(function, *args, **kwargs):
    """The result of a function, or the exception that it raises, as text."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def assert_close(found, expected, rtol=1e-10, atol=None):
    """Nested dicts of tensors and numbers, or tuples of such."""
    assert not isinstance(found, str), found
    torch.testing.assert_close(
        found, expected, rtol=rtol, atol=rtol / 100 if atol is None else atol
    )


class Group:
    """k processes, as torchrun would start them, that call functions of test files.

    An exception is returned as `"ValueError: its message"`, and -9 for a process killed by SIGKILL.
    """

    def __init__(self, k):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.processes, self.connections = [], []
        for rank in range(k):
            mine, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=serve, args=(theirs, rank, k, port), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
            self.connections.append(mine)

    def send(self, *call):
        for connection in self.connections:
            connection.send(call)

    def receive(self):
        results = []
        for process, connection in zip(self.processes, self.connections):
            assert connection.poll(90), f"a process hangs: {results}"
            try:
                results.append(pickle.loads(connection.recv_bytes()))
            except (EOFError, ConnectionResetError):
                process.join(10)
                results.append(process.exitcode)
        return results

    def end(self):
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.join(10)
            process.kill()


def run_in_processes(k, function, *args, **kwargs):
    """The results of a function in each of k new processes, which end when it returns."""
    group = Group(k)
    try:
        group.send(function.__module__, function.__name__, args, kwargs)
        group.send()
        return group.receive()
    finally:
        group.end()


def serve(connection, rank, k, port):
    """Call functions until there is an empty call, or nobody at the other end."""
    ranks = {"WORLD_SIZE": k, "LOCAL_WORLD_SIZE": k, "RANK": rank, "LOCAL_RANK": rank}
    numbers = {**ranks, "GROUP_RANK": 0, "MASTER_PORT": port}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", TORCHELASTIC_RUN_ID="test")
    sys.path.insert(0, str(Path(__file__).parents[2]))  # for `from tests.strategies import ...`
    torch.set_num_threads(1)
    # else a DataLoader has no workers: daemons may not have children
    multiprocessing.current_process()._config["daemon"] = False
    with suppress(EOFError):
        while call := connection.recv():
            module, name, args, kwargs = call
            result = attempt(getattr(import_module(module), name), *args, **kwargs)
            # `send` would share tensors with a process that ends
            connection.send_bytes(pickle.dumps(result))
