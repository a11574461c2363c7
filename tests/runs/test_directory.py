"""A run directory's name says which strategy runs, on how many devices."""

from typing import Any

import pytest
from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy

from lightning_mgpu.devices import devices
from lightning_mgpu.runs.directory import find_registered_name, resolve_auto, run_name
from lightning_mgpu.strategies import ManualAllreduceStrategy

CLASSES = {
    "single_device": SingleDeviceStrategy,
    "ddp": DDPStrategy,
    "manual_allreduce": ManualAllreduceStrategy,
}
MANUAL = "lightning_mgpu.strategies.manual_allreduce.ManualAllreduceStrategy"
AUTO: dict[str, Any] = {"strategy": "auto", "devices": "auto", "accelerator": "auto"}


CPU, GPU = {"accelerator": "cpu"}, {"accelerator": "gpu"}
CASES: list[tuple[int, dict[str, Any]]] = [
    (0, {}),
    (1, {}),
    (4, {}),
    (4, {"devices": 1}),
    (4, CPU),
    (0, {"devices": "2"}),
    (0, {"devices": 2, "strategy": "manual_allreduce"}),
    (0, {"num_nodes": 2}),
    (4, {**GPU, "devices": "0,2", "num_nodes": 2}),
    (4, {**GPU, "devices": -1, "strategy": "ddp"}),
]


@pytest.mark.parametrize(("num_gpus", "options"), CASES, ids=str)
def test_the_strategy_is_the_trainers(
    num_gpus: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: num_gpus)
    monkeypatch.setattr("torch.cuda.is_available", lambda: num_gpus > 0)
    options = {**AUTO, "num_nodes": 1, **options}
    name, num = resolve_auto(Namespace(options))
    trainer = Trainer(**options, logger=False, enable_checkpointing=False)
    assert type(trainer.strategy) is CLASSES[name]
    assert num == len(devices(trainer))


@pytest.mark.parametrize(
    ("class_path", "allreduce", "name"),
    [
        (MANUAL, "lightning_mgpu.allreduce.tree.tree_allreduce", "manual_allreduce_tree"),
        (MANUAL, "my_allreduce.chain_allreduce", "manual_allreduce"),
        (MANUAL, None, "manual_allreduce"),
        ("lightning_mgpu.strategies.ManualAllreduceStrategy", None, "manual_allreduce"),
        ("my_package.ManualAllreduceStrategy", None, "ManualAllreduceStrategy"),
    ],
)
def test_a_class_has_its_registered_name(class_path: str, allreduce: str | None, name: str) -> None:
    arguments = Namespace(allreduce=allreduce, replicas=None) if allreduce else None
    strategy = Namespace(class_path=class_path, init_args=arguments)
    assert find_registered_name(strategy) == name


def test_what_the_trainer_refuses_has_a_name() -> None:
    assert resolve_auto(Namespace({**AUTO, "num_nodes": 1, "devices": 0})) == ("auto", 0)


def test_devices_of_the_strategys_own() -> None:
    arguments = Namespace(parallel_devices=["cpu", "cpu", "cpu"])
    strategy = Namespace(class_path="my_package.MyStrategy", init_args=arguments)
    trainer = Namespace({**AUTO, "num_nodes": 1, "strategy": strategy})
    config = Namespace(model=Namespace(class_path="my_package.Net"), trainer=trainer)
    assert run_name(config).endswith("_Net_MyStrategy_3")
