"""Training on devices that differ is training on one, to the same bits with `replicas`; a run can be repeated."""

from collections.abc import Callable

import pytest

FILES = ("parity", "replicas", "norms", "random", "optimizers")


@pytest.mark.slow
def test_parity(run_on_simulated_devices: Callable[..., None]) -> None:
    run_on_simulated_devices(*(f"test_{name}.py" for name in FILES))
