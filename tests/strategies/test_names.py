"""A strategy is found by a registered name or a dotted path."""

import pytest
from lightning.pytorch.strategies import DDPStrategy, Strategy

from lightning_mgpu.allreduce import ring_allreduce
from lightning_mgpu.strategies import DataParallelStrategy, ManualAllreduceStrategy
from lightning_mgpu.cli.strategy_names import find_strategy, make_strategy, strategy_config

PATH = "lightning_mgpu.strategies.DataParallelStrategy"


def make_ring(**options: int) -> Strategy:
    return ManualAllreduceStrategy(ring_allreduce, **options)


@pytest.mark.parametrize(
    ("name", "strategy_class"),
    [
        ("ddp", DDPStrategy),
        ("ddp_find_unused_parameters_true", DDPStrategy),
        ("manual_allreduce_ring", ManualAllreduceStrategy),
        (PATH, DataParallelStrategy),
        (f"{__name__}.make_ring", ManualAllreduceStrategy),
    ],
)
def test_a_new_strategy_each_time(name: str, strategy_class: type) -> None:
    first, second = make_strategy(name), make_strategy(name)
    assert type(first) is type(second) is strategy_class and first is not second


def test_options_go_before_the_registered_arguments() -> None:
    assert make_strategy("auto") == "auto"
    ring = make_strategy("manual_allreduce_ring", replicas=4)
    assert isinstance(ring, ManualAllreduceStrategy)
    assert ring.allreduce is ring_allreduce and ring.num_replicas == 4
    find_strategy("ddp")[1]["start_method"] = "changed"  # a copy: the registry stays as it is
    assert find_strategy("ddp")[1] == {"start_method": "popen"}


def test_a_configuration_has_paths() -> None:
    init_args = {"allreduce": "lightning_mgpu.allreduce.ring.ring_allreduce"}
    assert strategy_config("manual_allreduce_ring") == {
        "class_path": "lightning_mgpu.strategies.manual_allreduce.ManualAllreduceStrategy",
        "init_args": init_args,
    }
    assert strategy_config(PATH) == {"class_path": PATH}


@pytest.mark.parametrize("name", ["dpp", "my_package.MyStrategy", "lightning_mgpu.strategies"])
def test_no_such_strategy(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^strategy {name}: no such strategy\. Take ddp, dp, "):
        make_strategy(name)
