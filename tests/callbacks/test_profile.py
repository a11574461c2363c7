"""Whether a run is long enough to be looked at; what is seen then stands in test_modes.py."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest

from lightning_mgpu.callbacks import Profile
from lightning_mgpu.models import LeNet


@pytest.mark.parametrize(("limits", "is_long"), [((-1, 8), True), ((-1, 7), False), ((2, -1), True), ((1, -1), False)])
def test_profile_counts_the_batches_of_the_run(
    limits: tuple[int, int], is_long: bool, make_data: Callable, make_trainer: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.profiler.profile.start", lambda self: None)
    monkeypatch.setattr("torch.profiler.profile.step", lambda self: None)
    monkeypatch.setattr("torch.profiler.profile.stop", lambda self: None)
    trainer = make_trainer(max_epochs=limits[0], max_steps=limits[1], callbacks=[Profile()])  # 7 batches an epoch
    with nullcontext() if is_long else pytest.raises(ValueError, match=r"5 batches after 3, .* only 7: give it more"):
        trainer.fit(LeNet(), make_data())
