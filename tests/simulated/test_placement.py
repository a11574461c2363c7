"""Everything a step uses is on its replica's device."""

from collections.abc import Callable

import pytest


@pytest.mark.slow
def test_placement(run_on_simulated_devices: Callable[..., None]) -> None:
    run_on_simulated_devices("placement")
