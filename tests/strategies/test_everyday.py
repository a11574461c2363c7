"""Loaders and checkpoints of everyday use: two processes do as one device does."""

import multiprocessing

from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from tests.strategies.conftest import Net, assert_close, attempt, fit, samples


class LogsOnce(Net):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))
        if self.trainer.is_global_zero:
            self.log("seen", float(batch_idx), rank_zero_only=True)


def loader(num_workers, shuffle=False):
    kept = {"persistent_workers": True, "multiprocessing_context": "fork"} if num_workers else {}
    return DataLoader(samples(), 10, shuffle=shuffle, num_workers=num_workers, **kept)


def fit_twice():
    data, val = loader(1), loader(1)
    for _ in range(2):
        found = attempt(fit, LogsOnce, data, val)
    return len(multiprocessing.active_children()), found


def go_on(directory):
    """Two epochs, and the second one again, from Lightning's own checkpoint of the first."""
    saves = ModelCheckpoint(directory, save_top_k=-1, filename="{epoch}")
    whole = attempt(fit, Net, loader(2, True), callbacks=saves, enable_checkpointing=True)
    saved = directory / "epoch=0.ckpt"
    return [whole, attempt(fit, Net, loader(2, True), ckpt_path=saved)]


def test_a_second_fit_starts_workers_again(in_two_processes):
    state, logged = fit(LogsOnce, DataLoader(samples(), 10), DataLoader(samples(), 10))
    for num_children, (other, other_logged) in in_two_processes(fit_twice):
        assert num_children == 0
        assert_close(other, state)
        assert_close(other_logged["val_loss"], logged["val_loss"])


def test_a_checkpoint_of_lightning_goes_on(in_two_processes, tmp_path):
    expected = go_on(tmp_path / "one")
    for found in in_two_processes(go_on, tmp_path / "two"):
        assert_close(found, expected)
