"""Lightning's FSDP, whose processes have only shards of the parameters, on two CPU processes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

from lightning_mgpu.cli.checks import check_strategy
from lightning_mgpu.errors import UsageError
from lightning_mgpu.files import replacing
from lightning_mgpu.runs.checkpoint_file import check_readable

CPU_FSDP = '''
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn import Module


class CPUFSDP(FSDPStrategy):
    """Lightning runs `FSDPStrategy` itself only on GPUs, and names the device to torch by index."""

    def _setup_model(self, model: Module) -> Module:
        options = {"sharding_strategy": self.sharding_strategy, **self.kwargs}
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)
'''
DEVICES = ("--trainer.accelerator=cpu", "--trainer.devices=2")
STRATEGY = ("--config=trainer/fsdp.yaml", "--trainer.strategy=cpu_fsdp.CPUFSDP", *DEVICES)
LIMITS = ("--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1")
SHORT = ("--data.source=synthetic", *LIMITS)
MOMENTUM = ("--model.optimizer=SGD", "--model.optimizer.lr=0.1", "--model.optimizer.momentum=0.9")
LAUNCHER = "lightning.pytorch.strategies.launchers.subprocess_script._SubprocessScriptLauncher"
NUM_PARAMETERS = 129_068  # LeNet's, of both shards


def test_fsdp(command: Any, tmp_path: Path) -> None:
    """`fit` and `--resume`, each to its end, with checkpoints of the whole model."""
    (tmp_path / "cpu_fsdp.py").write_text(CPU_FSDP)
    run = tmp_path / "run"
    options = (*STRATEGY, *SHORT, *MOMENTUM, f"--run_dir={run}", "--trainer.max_epochs=1")
    status, out, err = command("fit", *options)
    assert status == 0, err
    assert f"LeNet, {NUM_PARAMETERS:,} parameters" in out
    total = next(s for s in (run / "model.txt").read_text().splitlines() if "Total params" in s)
    assert total.split()[:2] == ["129", "K"]  # not a shard's
    best = run / "checkpoints" / "epoch=0-step=2.ckpt"
    *_, told, fingerprint, closing = out.splitlines()
    assert told.startswith("not tested") and told.endswith(f"test --ckpt_path={best}")
    assert fingerprint.startswith("fingerprint: none") and "sec/epoch" in closing

    weights = torch.load(best, weights_only=True)["state_dict"]  # under the module's own keys
    assert weights["net.0.weight"].shape == (20, 1, 3, 3)
    assert sum(weight.numel() for weight in weights.values()) == NUM_PARAMETERS

    status, out, err = command("fit", f"--resume={run}", "--trainer.max_epochs=2")
    assert status == 0 and "epoch 2/2" in out, err


def test_a_resume_that_fails_is_refused(main: Any, capfd: Any, monkeypatch: Any) -> None:
    """The book's SGD has no state, and Lightning's FSDP takes the first key of it."""
    Path("cpu_fsdp.py").write_text(CPU_FSDP)
    one_device = ("--trainer.accelerator=cpu", "--trainer.devices=1")
    assert main("fit", *SHORT, *one_device, "--trainer.max_epochs=1", "--run_dir=run") == 0
    capfd.readouterr()
    monkeypatch.setattr(f"{LAUNCHER}.launch", lambda *args, **kwargs: pytest.fail("it starts"))
    ddp = "--trainer.strategy=ddp"
    assert main("fit", "--resume=run", *STRATEGY, "--trainer.max_epochs=2") == 2
    err = capfd.readouterr().err
    assert "run/checkpoints/last.ckpt: Lightning's FSDP cannot go on" in err and ddp in err
    assert len([line for line in err.splitlines() if line.startswith("error:")]) == 1


class Sharded(FSDPStrategy):
    def __init__(self) -> None:
        super().__init__(state_dict_type="sharded")


def test_directories_as_checkpoints_are_refused(make_trainer: Any, tmp_path: Path) -> None:
    """By a strategy's options, also those of a subclass; what is one all the same has one line."""
    for strategy, told in (
        (Sharded(), "state_dict_type=sharded.* take full"),
        (ModelParallelStrategy(), "save_distributed_checkpoint=True.* take False"),
    ):
        with pytest.raises(UsageError, match=told):
            check_strategy(strategy)
    check_strategy(FSDPStrategy())
    check_strategy(ModelParallelStrategy(save_distributed_checkpoint=False))

    def save() -> None:
        with replacing(tmp_path / "last.ckpt") as part:
            part.mkdir()
            check_readable(make_trainer(), part)

    with pytest.raises(UsageError, match="is a directory of shards"):
        save()
    assert not list(tmp_path.iterdir())
