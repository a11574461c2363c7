"""A process that ends, hangs or trains something else ends the others, within the timeout."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.strategies.conftest import Net, attempt, fit, make_strategy, rank, run_in_processes

SECONDS = 3.0
ENDED = "another process has ended: see any message above"


class Fails(Net):
    """Something happens in the third step of process 1."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        fails = rank() == 1 and batch_idx == 2
        return self.fail(self.loss(batch)) if fails else self.loss(batch)

    def fail(self, loss: Any) -> Any:
        """Returns no loss."""


class Killed(Fails):
    def fail(self, loss: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


class Raises(Fails):
    def fail(self, loss: Any) -> Any:
        raise KeyError("mine")


class Hangs(Fails):
    def fail(self, loss: Any) -> Any:
        time.sleep(4 * SECONDS)
        return loss


class Edits(Net):
    """An edit that depends on the rank."""

    def on_train_epoch_end(self) -> None:
        with torch.no_grad():
            self.net[2].bias[1] += 1e-15 * rank()


ENDS: dict[str, tuple[Callable[[], Net], list[Any]]] = {  # what both processes end with
    "killed": (Killed, [ENDED, -signal.SIGKILL]),
    "raises": (Raises, [ENDED, "KeyError: 'mine'"]),
    "hangs": (Hangs, [ENDED, ENDED]),
    "no loss": (Fails, [ENDED, "every shard needs a loss"]),
}


def fit_one(name: str) -> Any:
    make = Edits if name == "edited" else ENDS[name][0]
    return attempt(fit, make, strategy=make_strategy(SECONDS))


@pytest.mark.parametrize("name", ENDS)
def test_a_process_that_fails_ends_all(name: str) -> None:
    for found, said in zip(run_in_processes(2, fit_one, name), ENDS[name][1]):
        assert found == said or said in found, found


def test_other_weights_are_found_at_the_end() -> None:
    for found in run_in_processes(2, fit_one, "edited"):
        assert "net.2.bias of process 1 is not that of process 0" in found and "\n" not in found
