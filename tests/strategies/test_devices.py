"""What shows only where devices differ, on fake tensors, which have a device and no data: mixing devices raises."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn, optim
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from lightning_mgpu.strategies.batch.gather import gather
from lightning_mgpu.strategies.optimizers.lockstep import Lockstep
from lightning_mgpu.strategies.optimizers.optimizer_copies import copy_optimizer
from lightning_mgpu.strategies.recording.recording import Record, Recorder, find_metrics
from lightning_mgpu.strategies.recording.replay import replay
from lightning_mgpu.strategies.replicas.replicas import Replicas

CPU, FIRST, SECOND = (torch.device(name) for name in ("cpu", "cuda:0", "cuda:1"))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    try:
        with FakeTensorMode():
            torch.empty(1, device=SECOND).to(FIRST)
    except (RuntimeError, AssertionError):
        pytest.skip("this torch makes no fake CUDA tensors without a driver")
    # torch copies a fake tensor's mode with it, and then has two
    monkeypatch.setattr(FakeTensor, "__deepcopy__", lambda self, memo: self.detach().clone(), raising=False)
    with FakeTensorMode():
        yield


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("fused", [False, True])
def test_a_copied_optimizer_has_its_state_where_its_parameters_are(fused: bool) -> None:
    """As after a checkpoint was loaded; Adam keeps its step counter on the CPU, fused on the GPU."""
    first, second = (nn.Parameter(torch.empty(3, device=device)) for device in (FIRST, SECOND))
    original = optim.Adam([first], fused=fused)
    step = torch.empty((), device=FIRST if fused else CPU)
    original.state[first] = {"step": step, "exp_avg": first.detach().clone(), "exp_avg_sq": first.detach().clone()}
    [(parameter, state)] = copy_optimizer(original, [first], [second]).state.items()
    assert parameter is second
    assert {name: value.device for name, value in state.items()} == {
        "step": SECOND if fused else CPU,
        "exp_avg": SECOND,
        "exp_avg_sq": SECOND,
    }


class Alone:
    """A team of which one replica is here; the others give what they always give."""

    def __init__(self, index: int, others: list[Any]) -> None:
        self.index, self.others, self.devices, self.given = index, others, [FIRST, SECOND], []

    def exchange(self, value: Any = None) -> list[Any]:
        self.given.append(value)
        return [value, *self.others] if isinstance(value, Tensor) else [value, value]


@pytest.mark.usefixtures("gpus")
def test_losses_of_closures_meet_on_the_first_device() -> None:
    team: Any = Alone(0, [torch.empty((), device=SECOND)])
    loss = Lockstep(team, {0: 1, 1: 1}, joint=True).step(
        0, lambda closure: closure(), lambda: torch.empty((), device=FIRST), lambda: None
    )
    assert loss.device == FIRST


@pytest.mark.usefixtures("gpus")
def test_lists_of_samples_and_what_does_not_fit_together_come_to_the_first_device() -> None:
    boxes = [[torch.empty(n, 4, device=device) for n in (1, 2)] for device in (FIRST, SECOND)]
    assert {item.device for item in gather(boxes, [2, 2], FIRST)} == {FIRST}
    unlike = [{torch.empty(2, device=FIRST)}, {torch.empty(3, device=SECOND)}]  # sets, which nobody joins
    assert len(gather(unlike, [2, 2], FIRST)) == 2


@pytest.mark.usefixtures("gpus")
def test_what_one_replica_logs_alone_comes_to_the_first_device(monkeypatch: pytest.MonkeyPatch) -> None:
    module = LightningModule()
    vars(module)["_device"] = FIRST
    logged = []
    log = "lightning_mgpu.strategies.recording.recording.LOG"
    monkeypatch.setattr(log, lambda module, name, value, **kwargs: logged.append(value))
    records = [Record(), Record(logged=[("rare", torch.empty((), device=SECOND), {})])]
    replay(Recorder(module, find_metrics(module)), records, [2, 2])
    assert [value.device for value in logged] == [FIRST]


class Unwaited(TorchFunctionMode):
    """Copies to the CPU that begin and are not waited for: from a GPU the values may come after they are read."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.copy_, Tensor.to) and kwargs.get("non_blocking"):
            self.num += args[0].is_cpu if func is Tensor.copy_ else args[1] == CPU
        return func(*args, **kwargs)


def test_copies_to_the_cpu_are_waited_for(Regression: Any, train: Any) -> None:
    def make() -> nn.Module:
        return Regression(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))

    with Unwaited() as unwaited:
        train(make, 2, val=True, limit_train_batches=3)
    assert unwaited.num == 0


def test_tensors_in_lists_come_to_the_replicas_device() -> None:
    module = LightningModule()
    module.net, module.anchors = nn.Linear(2, 2), [torch.ones(2)]  # type: ignore[assignment]
    replicas = Replicas(module, [CPU, torch.device("meta")])
    module.pair, module.by_name = (torch.ones(2), 1), {"boxes": [torch.ones(2)]}  # type: ignore[assignment]
    for _ in range(2):
        replicas.refresh()
        replica: Any = replicas.modules[1]
        tensors = [replica.anchors[0], replica.pair[0], replica.by_name["boxes"][0]]
        assert [tensor.device.type for tensor in tensors] == ["meta"] * 3
        replicas.collect([0, 1])
    assert module.anchors[0].device == CPU  # type: ignore[index]
