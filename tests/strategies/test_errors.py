"""What goes wrong ends at once, as itself, in one line where it is the user's mistake; nothing hangs or stays."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric

from lightning_mgpu.allreduce import textbook_allreduce
from lightning_mgpu.strategies import ManualAllreduceStrategy

ROOT = Path(__file__).parents[2]


class BadBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, X: Tensor) -> Tensor:
        return X.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise LookupError("in backward")


class BadMetric(Metric):
    def update(self, X: Tensor) -> None:
        raise LookupError("in metric")

    def compute(self) -> Tensor:
        return torch.tensor(0.0)


class Fails(LightningModule):
    """Fails in step 1 where `where` says, if a shard has the sample with the largest value: replica 1's."""

    def __init__(self, where: str = "", manual: bool = False) -> None:
        super().__init__()
        self.net = nn.Linear(2, 1).double()
        self.where = where
        self.automatic_optimization = not manual
        self.metric = BadMetric() if where == "metric" else nn.Identity()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        (X,) = batch
        fails = batch_idx == 1 and X.max() >= 15
        if fails and self.where in ("forward", "interrupt"):
            raise KeyboardInterrupt if self.where == "interrupt" else LookupError("in forward")
        if fails and self.where == "metric":
            self.metric(X)
        X = BadBackward.apply(self.net(X)) if fails and self.where == "backward" else self.net(X)
        loss = F.mse_loss(X, X.detach() + 1)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1e-3)


def loader() -> DataLoader:
    return DataLoader(TensorDataset(torch.arange(24, dtype=torch.float64).view(12, 2)), 4)


def assert_clean_and_usable(trainer_on: Any) -> None:
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("replica-")]
    trainer_on().fit(Fails(), loader())


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward", "metric"])
def test_a_failure_in_one_replica(trainer_on: Any, where: str, manual: bool) -> None:
    num_threads = torch.get_num_threads()
    trainer = trainer_on()
    with pytest.raises(LookupError, match=f"in {where}") as raised:
        trainer.fit(Fails(where, manual), loader())
    device = trainer.strategy.devices[1]
    notes = " ".join(getattr(raised.value, "__notes__", map(str, raised.value.args)))
    if where != "backward" or device.type == "cpu":
        assert f"raised in replica 1 on {device}" in notes
    else:  # one backward pass runs for all
        assert "raised in replica" not in notes
    assert torch.get_num_threads() == num_threads
    assert_clean_and_usable(trainer_on)


@pytest.mark.parametrize("manual", [False, True])
def test_ctrl_c_in_a_replica(trainer_on: Any, manual: bool) -> None:
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer_on().fit(Fails("interrupt", manual), loader())
    assert_clean_and_usable(trainer_on)


@pytest.mark.parametrize("manual", [False, True])
def test_an_allreduce_that_fails_in_training(trainer_on: Any, manual: bool) -> None:
    is_training = False

    def allreduce(tensors: list[Tensor]) -> None:
        if is_training:
            raise LookupError("cable")
        textbook_allreduce(tensors)

    class Starts(Fails):
        def on_train_start(self) -> None:
            nonlocal is_training
            is_training = True

    with pytest.raises(LookupError, match="cable"):
        trainer_on(strategy=ManualAllreduceStrategy(allreduce)).fit(Starts(manual=manual), loader())
    assert_clean_and_usable(trainer_on)


def message(raised: pytest.ExceptionInfo) -> str:
    text = str(raised.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    "split", [[1.0], [1.0, 1.0, 1.0], [1.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")], []]
)
def test_wrong_split(trainer_on: Any, split: list[float]) -> None:
    with pytest.raises(MisconfigurationException) as raised:
        trainer_on(strategy=ManualAllreduceStrategy(split=split)).fit(Fails(), loader())
    assert str(split) in message(raised) and "one positive share for each of the 2 devices" in message(raised)


def test_split_of_another_name() -> None:
    with pytest.raises(MisconfigurationException) as raised:
        ManualAllreduceStrategy(split="even")  # type: ignore[arg-type]
    assert "split='even'" in message(raised) and "auto" in message(raised)


@pytest.mark.parametrize("name", ["gpu:0", "cuda:x", "nonsense", ""])
def test_unknown_devices(name: str) -> None:
    with pytest.raises(MisconfigurationException) as raised:
        ManualAllreduceStrategy(parallel_devices=["cpu", name])
    assert repr(name) in message(raised) and "cuda:0" in message(raised)


def test_cuda_devices_that_are_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    strategy = ManualAllreduceStrategy(parallel_devices=["cuda:0", "cuda:0", "cuda"])
    assert strategy.devices == [torch.device("cuda:0")] * 3  # torch takes none without a number for the current one
    with pytest.raises(MisconfigurationException) as raised:
        ManualAllreduceStrategy(parallel_devices=["cuda:0", "cuda:1"])
    assert "no 'cuda:1' here; torch sees 1 CUDA device(s)" in message(raised)


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "1", "LOCAL_RANK": "1",
    "GROUP_RANK": "0",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0",
    "SLURM_NTASKS_PER_NODE": "1",
}  # fmt: skip
LAUNCHERS = [(TORCHRUN, "WORLD_SIZE"), (SLURM, "SLURM_NTASKS")]


@pytest.mark.parametrize(("variables", "world_size"), LAUNCHERS)
def test_several_processes_are_refused(
    trainer_on: Any, variables: Any, world_size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**variables, world_size: "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(MisconfigurationException) as raised:
        trainer_on().fit(Fails(), loader())
    assert "2 were launched" in message(raised) and "--trainer.strategy=ddp" in message(raised)


@pytest.mark.filterwarnings("ignore:The `srun` command")
@pytest.mark.parametrize(("variables", "world_size"), LAUNCHERS)
def test_a_single_process_is_accepted(
    trainer_on: Any, variables: Any, world_size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**variables, "RANK": "0", "LOCAL_RANK": "0", world_size: "1"}.items():
        monkeypatch.setenv(name, value)
    trainer = trainer_on(3)
    trainer.fit(Fails(), loader())
    assert (trainer.world_size, trainer.global_rank, trainer.local_rank, trainer.node_rank) == (1, 0, 0, 0)
    assert trainer.is_global_zero
    assert trainer.distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0}  # it gets whole batches


@pytest.mark.parametrize("environment", [SLURMEnvironment(auto_requeue=False), TorchElasticEnvironment()])
def test_a_launcher_that_is_not_there_has_started_no_processes(trainer_on: Any, environment: Any) -> None:
    trainer_on(plugins=[environment]).fit(Fails(), loader())


def test_several_nodes_are_refused(trainer_on: Any) -> None:
    with pytest.raises(MisconfigurationException) as raised:
        trainer_on(num_nodes=2).fit(Fails(), loader())
    assert "num_nodes=2" in message(raised) and "ddp" in message(raised)


# Processes of their own


SCRIPT = """
    import time, torch
    from torch import nn
    from lightning.pytorch import LightningModule, Trainer
    import lightning_mgpu.strategies

    class Slow(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(2, 1)
            self.automatic_optimization = {automatic}

        def training_step(self, batch, batch_idx):
            loss = self.net(batch).square().mean()
            if batch_idx == 2 and batch.max() == 3:
                print("waiting", flush=True)
                time.sleep({seconds})
            if self.automatic_optimization:
                return loss
            self.manual_backward(loss)
            self.optimizers().step()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 1e-3)

    if __name__ == "__main__":
        X = torch.arange(4.0).repeat(2, 1).T.contiguous().repeat(100, 1)
        Trainer(accelerator="cpu", devices=2, strategy="{engine}", max_epochs=1, logger=False,
                enable_checkpointing=False, enable_progress_bar=False).fit(
            Slow(), torch.utils.data.DataLoader(X, 4))
"""


@pytest.mark.slow
@pytest.mark.parametrize("automatic", [True, False])
def test_sigint_ends_the_process(automatic: bool, engine: str, tmp_path: Path) -> None:
    """While replica 1 is busy and replica 0 waits for it."""
    script = tmp_path / "slow.py"
    script.write_text(textwrap.dedent(SCRIPT).format(automatic=automatic, engine=engine, seconds=3))
    with subprocess.Popen(
        [sys.executable, script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        while "waiting" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        start = time.monotonic()
        _, errors = process.communicate(timeout=60)
        assert time.monotonic() - start < 20
        assert process.returncode != 0
        assert "terminate called" not in errors
        assert "KeyboardInterrupt" in errors, errors


@pytest.mark.parametrize("output", [5.0, "loss", [1.0], {"a": 5}, MappingProxyType({"a": 5})])
@pytest.mark.parametrize("num_samples", [1, 4])
def test_lightning_refuses_what_a_step_returns(trainer_on: Any, output: Any, num_samples: int) -> None:
    class Returns(Fails):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return output

    with pytest.raises(MisconfigurationException, match=r"`training_step` (must return|returns a dict)"):
        trainer_on().fit(Returns(), DataLoader(TensorDataset(torch.ones(num_samples, 2).double()), num_samples))


def test_steps_after_the_run(trainer_on: Any) -> None:
    """As Lightning's own tests do: the module alone computes them."""
    module, trainer = Fails(), trainer_on()
    trainer.fit(module, loader())
    batch = next(iter(loader()))
    loop, weight = trainer.fit_loop.epoch_loop.automatic_optimization, next(module.parameters()).clone()
    outputs = loop.run(trainer.optimizers[0], 0, {"batch": batch, "batch_idx": 0})
    assert outputs["loss"] > 0  # type: ignore[operator]
    assert not torch.equal(weight, next(module.parameters()))
