"""Attributes of data modules and strategies that may be missing, and where they are documented."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import LightningDataModule
from lightning.pytorch.strategies import DDPStrategy

from lightning_mgpu.data import FashionMNIST
from lightning_mgpu.protocols import DataFacts, StrategyFacts, data_facts, strategy_facts
from lightning_mgpu.strategies import ManualAllreduceStrategy

PAGE = Path(__file__).parents[1] / "docs" / "adding.md"


def facts_of(data: Any) -> DataFacts:
    trainer: Any = SimpleNamespace(datamodule=data)
    return data_facts(trainer)


def test_what_is_missing_has_a_default() -> None:
    for data in (None, LightningDataModule()):
        facts = facts_of(data)
        assert (facts.classes, facts.summary, facts.validates_on_test_set) == ((), "", False)
    facts = facts_of(FashionMNIST(val_size=0))
    assert facts.validates_on_test_set and len(facts.classes) == 10
    ddp, ours = strategy_facts(DDPStrategy()), strategy_facts(ManualAllreduceStrategy())
    assert not ddp.weighs_losses and ddp.allreduce is None and ddp.shares == ()
    assert ours.weighs_losses and ours.allreduce.__name__ == "textbook_allreduce"


def test_nothing_else_is_asked_for() -> None:
    with pytest.raises(AttributeError, match="batch_size"):
        facts_of(FashionMNIST()).batch_size  # type: ignore[attr-defined] # noqa: B018


@pytest.mark.parametrize("protocol", [DataFacts, StrategyFacts])
def test_the_page_has_all_attributes(protocol: type) -> None:
    page = PAGE.read_text()
    assert len(protocol.__annotations__) >= 3
    for name in protocol.__annotations__:
        assert f"| `{name}` |" in page
