"""Everything a step uses is on its replica's device."""

from collections.abc import Callable

import pytest

OTHERS = (
    "test_errors.py::test_a_failure_in_one_replica",
    "test_trainer.py::test_actions_profiled_in_a_step_count_once",
)


@pytest.mark.slow
def test_placement(run_on_simulated_devices: Callable[..., None]) -> None:
    run_on_simulated_devices("placement", *OTHERS)
