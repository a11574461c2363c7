"""Training on devices that differ is training on one; a run can be repeated."""

from collections.abc import Callable

import pytest

FILES = ("parity", "norms", "dropout", "structure", "lists", "attributes", "schedulers")


@pytest.mark.slow
def test_parity(run_on_simulated_devices: Callable[..., None]) -> None:
    run_on_simulated_devices(*(f"test_{name}.py" for name in FILES))
