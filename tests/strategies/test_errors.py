"""What goes wrong ends at once, as itself, a user's mistake in one line; nothing hangs or stays."""

import threading

import pytest
import torch
from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from tiny_runs import DP, Manual, Regression, a_loader, is_second_shard, ordered_loader, refused
from torch import nn, optim
from torchmetrics import MeanMetric

from lightning_mgpu.allreduce import textbook_allreduce
from lightning_mgpu.strategies import ManualAllreduceStrategy, manual_allreduce

WRONG_OPTIONS = [  # given for two devices; what the one line says
    *(
        ({"split": split}, "one positive share per device (2)")
        for split in ([1.0], [1.0, 0.0], "even")
    ),
    *(({"split": [1.0, share]}, "one positive share") for share in (float("nan"), float("inf"))),
    ({"replicas": 3}, "replicas=3: choose a multiple of the 2 device"),
    ({"replicas": 0}, "replicas=0: choose a multiple"),
    ({"replicas": 4, "split": "auto"}, "leave `split` out"),
    ({"allreduce": "nonsense"}, "allreduce=nonsense: give a function"),
    ({"parallel_devices": ["cpu"] * 99}, "99 devices are too many"),
    ({"processes": 3}, "2 device(s) cannot be shared out among the 3 processes"),
    ({"processes": 2, "split": [0.7, 0.3]}, "2 processes: leave `split` out"),
    ({"processes": 2, "replicas": 3}, "replicas=3: choose a multiple of the 2 device"),
    *(
        ({"parallel_devices": ["cpu", name]}, f"{name!r} is not a device; 'cpu'")
        for name in ("gpu:0", "cuda:x")
    ),
]


@pytest.mark.parametrize(("options", "said"), WRONG_OPTIONS, ids=str)
def test_options_that_do_not_fit(trainer_on, options, said):
    with refused(said):
        trainer_on(strategy=ManualAllreduceStrategy(**options)).fit(Regression(), a_loader())


def test_cuda_devices_that_are_not_here(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    strategy = ManualAllreduceStrategy(parallel_devices=["cuda:0", "cuda:0", "cuda"])
    # torch takes none without a number for the current one
    assert strategy.devices == [torch.device("cuda:0")] * 3
    with refused("no 'cuda:1'; torch sees 1 CUDA device(s)"):
        ManualAllreduceStrategy(parallel_devices=["cuda:0", "cuda:1"])


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29511",
    "GROUP_RANK": "0",
}
SLURM = {"SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
SLURM |= {"SLURM_NODEID": "0", "SLURM_NTASKS_PER_NODE": "1"}
LAUNCHERS = [({**TORCHRUN, "RANK": "0", "LOCAL_RANK": "0"}, "WORLD_SIZE"), (SLURM, "SLURM_NTASKS")]


@pytest.mark.filterwarnings("ignore:The `srun` command")
@pytest.mark.parametrize(("variables", "world_size"), LAUNCHERS, ids=["torchrun", "slurm"])
def test_launchers(trainer_on, engine, variables, world_size, monkeypatch):
    """dp refuses several processes. A single one is rank 0 of 1."""
    for name, value in {**variables, world_size: "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    if engine == DP:
        with refused("but there are 2: use --trainer.strategy=manual_allreduce, or ddp"):
            trainer_on().fit(Regression(), a_loader())
    monkeypatch.setenv(world_size, "1")
    trainer = trainer_on(3)
    trainer.fit(Regression(), a_loader())
    assert (trainer.world_size, trainer.global_rank, trainer.local_rank, trainer.node_rank) == (
        1,
        0,
        0,
        0,
    )
    assert trainer.is_global_zero and trainer.distributed_sampler_kwargs == {
        "num_replicas": 1,
        "rank": 0,
    }


@pytest.mark.parametrize(
    "environment", [SLURMEnvironment(auto_requeue=False), TorchElasticEnvironment()]
)
def test_a_launcher_that_is_not_there_has_started_no_processes(trainer_on, environment):
    trainer_on(plugins=[environment]).fit(Regression(), a_loader())


def fails(where, base):
    """A module that fails in step 1 where `where` says, in the second replica."""

    def fail(*_):
        raise (KeyboardInterrupt if where == "interrupt" else LookupError)(f"in {where}")

    class Fails(base):
        def __init__(self):
            super().__init__()
            self.metric = type("Fails", (MeanMetric,), {"update": fail})()

        def loss(self, batch):
            X, y = batch
            if self.trainer.global_step == 1 and is_second_shard(batch):
                if where == "metric":
                    self.metric(X)
                elif where == "backward":
                    X = X.clone().requires_grad_()
                    X.register_hook(fail)
                else:
                    fail()
            return super().loss([X, y])

    return Fails()


def assert_clean_and_usable(trainer_on):
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("replica-")]
    trainer_on().fit(Regression(), a_loader())


@pytest.mark.parametrize("base", [Regression, Manual])
@pytest.mark.parametrize("where", ["forward", "backward", "metric", "interrupt"])
def test_a_failure_in_one_replica(trainer_on, where, base):
    """It is that replica's exception, and says so. A metric of the user's fails for them all."""
    trainer = trainer_on()
    with pytest.raises((LookupError, KeyboardInterrupt, SystemExit)) as raised:
        trainer.fit(fails(where, base), ordered_loader())
    if where != "interrupt":
        assert f"in {where}" in str(raised.value)
    if where in ("forward", "backward"):
        assert f"raised in replica 1 on {trainer.strategy.devices[1]}" in raised.value.__notes__
    assert_clean_and_usable(trainer_on)


def averages(tensors):
    textbook_allreduce(tensors)
    for tensor in tensors:
        tensor.div_(len(tensors))


def test_a_wrong_allreduce_is_refused_on_start(trainer_on):
    """The same in all replicas, but no sum."""
    with pytest.raises(ValueError, match="averages"):
        trainer_on(strategy=ManualAllreduceStrategy(averages)).fit(Regression(), a_loader())


def stops_after(num_calls, error):
    """An allreduce that stops exchanging after some calls, or raises."""
    calls = []

    def allreduce(tensors):
        calls.append(1)
        if len(calls) <= num_calls:
            textbook_allreduce(tensors)
        elif error is not None:
            raise error

    return allreduce


@pytest.mark.parametrize("base", [Regression, Manual])
@pytest.mark.parametrize("error", [None, LookupError("cable")], ids=str)
def test_an_allreduce_that_stops_working(train, trainer_on, monkeypatch, error, base):
    """An exception is its own. If replicas' sums differ after it, the next epoch says so."""
    monkeypatch.setattr(manual_allreduce, "check_allreduce", lambda *_: None)
    with pytest.raises(LookupError if error else ValueError) as raised:
        train(
            base,
            2,
            strategy=ManualAllreduceStrategy(stops_after(10, error)),
            check=False,
            max_epochs=8,
        )
    said = "cable" if error else "left replica 1 ("
    assert said in str(raised.value)
    assert_clean_and_usable(trainer_on)


class Stepper:
    """What Lightning takes for an optimizer."""

    def __init__(self, module):
        self.param_groups, self.state, self.defaults = (
            [{"params": [*module.parameters()], "lr": 0.1}],
            {},
            {},
        )

    def step(self, closure=None):
        return closure()

    def zero_grad(self, *_):
        pass

    state_dict = load_state_dict = zero_grad


class Wrapper(optim.SGD):
    """Keeps its state in another optimizer."""

    state = property(
        lambda self: self.__dict__["own"], lambda self, own: self.__dict__.setdefault("own", own)
    )


REFUSED = {  # what is said of modules that several devices would train wrongly
    "(max_norm=...) edits its weights": lambda: Regression(
        nn.Sequential(nn.Embedding(3, 3, max_norm=1.0))
    ),
    "Stepper is not a torch.optim.Optimizer": lambda: Regression(optimizer=Stepper),
    "Wrapper is not a torch.optim.Optimizer with a state": lambda: Regression(
        optimizer=lambda module: Wrapper(module.parameters(), 0.1)
    ),
}


@pytest.mark.parametrize("said", REFUSED)
def test_refused_in_one_line(train, said):
    with refused(said):
        train(REFUSED[said], 2)
