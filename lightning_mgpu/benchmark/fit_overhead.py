"""What the Trainer costs: an epoch through `fit` against a hand-written PyTorch loop, both with metrics and logging on.

    python -m lightning_mgpu.benchmark.fit_overhead

Same model, data path, batches and threads in one process, a stretch of each after the other.
"""

import argparse
import os
import statistics
import tempfile
import time

import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch.optim import SGD

from lightning_mgpu.callbacks import EpochTimer
from lightning_mgpu.console import quieten
from lightning_mgpu.data import FashionMNIST
from lightning_mgpu.models import LeNet


def loop_seconds(data: FashionMNIST, num_batches: int) -> float:
    """Seconds of `num_batches` steps of the book's loop, written by hand."""
    model = LeNet()
    optimizer = SGD(model.parameters(), lr=0.2)
    start = time.perf_counter()
    for i, (X, y) in enumerate(data.train_dataloader()):
        optimizer.zero_grad()
        F.cross_entropy(model(X), y).backward()
        optimizer.step()
        if i + 1 == num_batches:
            break
    return time.perf_counter() - start


def fit_seconds(data: FashionMNIST, num_batches: int, log_dir: str) -> float:
    """Seconds of an epoch of `num_batches` steps through the Trainer, as `EpochTimer` takes them."""
    timer = EpochTimer()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        limit_train_batches=num_batches,
        limit_val_batches=0,
        callbacks=[timer],
        logger=CSVLogger(log_dir),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LeNet(), data)
    return timer.seconds_per_epoch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_batches", type=int, default=100)
    parser.add_argument("--batch_size", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--root", default="data")
    args = parser.parse_args()

    quieten()
    seed_everything(0, verbose=False)
    data = FashionMNIST(batch_size=args.batch_size, root=args.root)
    data.prepare_data()
    data.setup("fit")
    loop_seconds(data, 10)  # warm-up
    seconds = []
    with tempfile.TemporaryDirectory() as log_dir:
        for _ in range(args.repeats):
            seconds.append((loop_seconds(data, args.num_batches), fit_seconds(data, args.num_batches, log_dir)))
    per_step = 1000 / args.num_batches
    loop, fit = (statistics.median(pair[i] for pair in seconds) * per_step for i in (0, 1))
    ratio = statistics.median(fit / loop for loop, fit in seconds)
    print(f"LeNet, batch {args.batch_size}, {torch.get_num_threads()} threads on {os.cpu_count()} cores, ", end="")
    print(f"median of {args.repeats} stretches of {args.num_batches} steps")
    print(f"hand-written loop {loop:6.2f} ms a step")
    print(f"fit               {fit:6.2f} ms a step")
    print(f"ratio             {ratio:6.3f}")


if __name__ == "__main__":
    main()
