"""Print the table of docs/strategies.md: weights are identical in 1, 2, 4 processes, 2 machines.

    python scripts/fingerprints.py textbook top_k --trainer.limit_train_batches=20

Four replicas train for one epoch. A batch of 234 images is split into 59, 59, 58 and 58; the last
one, of 10, into 3, 3, 2 and 2. Default: all rows. Options are passed to every run. The machines are
emulated.
"""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, default_collate

from lightning_mgpu.data import FashionMNIST
from lightning_mgpu.models import Classifier

RUN = (
    *("--model=fingerprints.Net", "--model.optimizer=AdamW", "--trainer.strategy.replicas=4"),
    *("--model.lr_scheduler=ExponentialLR", "--model.lr_scheduler.gamma=0.99"),
    *("--model.lr_interval=step", "--data.batch_size=234", "--trainer.max_epochs=1"),
    *("--trainer.accelerator=cpu", "--wandb.mode=disabled", "--output.test=false"),
)
NAMES = [arg for arg in sys.argv[1:] if not arg.startswith("-")]
GIVEN = sys.argv[1 + len(NAMES) :]
BY_BOOK = "--trainer.strategy=manual_allreduce"
ROWS = {  # and the options of each
    "textbook": [BY_BOOK],
    **{name: [f"{BY_BOOK}_{name}"] for name in ("tree", "ring", "sharded", "key_value")},
    "top_k": ["--trainer.strategy=exchange_top_k"],
    "noisy images": [BY_BOOK, "--data=fingerprints.NoisyImages"],
    "padded": [BY_BOOK, "--data=fingerprints.PaddedImages"],
    "accumulated": [BY_BOOK, "--trainer.accumulate_grad_batches=2"],
    "two epochs": [BY_BOOK, "--trainer.max_epochs=2"],
    "resumed": [BY_BOOK],  # two epochs, the first one in a different place
}
PLACES = {
    "1 device": ["fit", "--trainer.num_nodes=1", "--trainer.devices=1"],
    "2 devices": ["fit", "--trainer.num_nodes=1", "--trainer.devices=2"],
    "4 devices": ["fit", "--trainer.num_nodes=1", "--trainer.devices=4"],
    "2 machines": ["network", "--machines=2", "--delay_ms=0", "--mbit=500", "fit"],
}
FIRST = dict(zip(PLACES, ["4 devices", "1 device", "2 machines", "1 device"]))  # of "resumed"


class Net(Classifier):
    def __init__(self, **kwargs: object) -> None:
        super().__init__(**kwargs)
        first = (nn.Conv2d(1, 8, 5, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.net = nn.Sequential(*first, nn.Dropout(0.3), nn.Linear(8 * 12 * 12, 10))


class NoisyImages(FashionMNIST):
    """A plain DataLoader with a worker, whose images get random noise when they are read."""

    noise, collate_fn = 0.1, staticmethod(default_collate)

    def train_dataloader(self) -> DataLoader:
        indices = torch.arange(len(self.train_set)).split(1)
        images = [self.train_set.read(0, index) for index in indices]
        samples = Noisy(images, self.noise)
        workers = {"num_workers": 1, "persistent_workers": True}
        return DataLoader(samples, self.batch_size, True, collate_fn=self.collate_fn, **workers)


class Noisy(Dataset):
    def __init__(self, images: list, noise: float) -> None:
        self.images, self.noise = images, noise

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        X, y = self.images[index]
        return X[0] + self.noise * torch.rand(X[0].shape), y[0]


class PaddedImages(NoisyImages):
    """Images padded on the left by the largest label of their shard."""

    noise = 0.0

    @staticmethod
    def collate_fn(samples: list) -> list[Tensor]:
        X, y = default_collate(samples)
        return [F.pad(X, (int(y.max()), 0))[..., : X.shape[-1]], y]


def fit(place: str, *options: str) -> str:
    line = [sys.executable, "-m", "lightning_mgpu", *PLACES[place], *options, *GIVEN]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}
    out = subprocess.check_output(line, env=env, text=True)
    return f" `{out.partition('fingerprint: ')[2].split()[0]}` |"


if __name__ == "__main__":
    if unknown := {*NAMES} - {*ROWS}:
        sys.exit(f"no row {unknown.pop()}: use {', '.join(ROWS)}; options have a =")
    print("| four replicas |", " | ".join(PLACES), "|")
    print("| --- " * (1 + len(PLACES)) + "|")
    for row in NAMES or ROWS:
        print(f"| {row} |", end="", flush=True)
        for place in PLACES:
            with TemporaryDirectory() as run:
                begin = FIRST[place] if row == "resumed" else place
                found = fit(begin, *RUN, *ROWS[row], f"--run_dir={run}")
                if row == "resumed":
                    found = fit(place, f"--resume={run}", "--trainer.max_epochs=2")
            print(found, end="", flush=True)
        print()
