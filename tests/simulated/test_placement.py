"""Everything a step uses is on its replica's device."""

from collections.abc import Callable

import pytest

FILES = ("attributes", "outputs", "manual", "checkpoints", "trainer")
OTHERS = ("test_errors.py::test_a_failure_in_one_replica", "test_metrics.py::test_ways_to_log_a_metric")


@pytest.mark.slow
def test_placement(run_on_simulated_devices: Callable[..., None]) -> None:
    run_on_simulated_devices(*(f"test_{name}.py" for name in FILES), *OTHERS)
