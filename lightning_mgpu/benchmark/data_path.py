"""How much faster this package's data path is than torchvision's dataset with `ToTensor` in a `DataLoader`.

python -m lightning_mgpu.benchmark.data_path
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterable

import torch
from torch.utils.data import DataLoader
from torchvision.datasets import FashionMNIST as FashionMNISTFiles
from torchvision.transforms import ToTensor

from lightning_mgpu.data import FashionMNIST


def samples_per_second(batches: Callable[[], Iterable], num_batches: int) -> float:
    """Samples a second of the first `num_batches` batches, the start of the iterator included."""
    num_samples = 0
    start = time.perf_counter()
    for i, (X, _) in enumerate(batches()):
        num_samples += len(X)
        if i + 1 == num_batches:
            break
    return num_samples / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default="data")
    parser.add_argument("--batch_size", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5, help="interleaved; the median ratio counts")
    args = parser.parse_args()

    data = FashionMNIST(batch_size=args.batch_size, root=args.root, val_size=0, num_workers=0, pin_memory=False)
    data.prepare_data()
    data.setup("fit")
    theirs = DataLoader(
        FashionMNISTFiles(args.root, transform=ToTensor()), batch_size=args.batch_size, shuffle=True, num_workers=0
    )
    ours = data.train_dataloader()
    samples_per_second(lambda: ours, len(ours))  # warm-up
    rates = [
        (samples_per_second(lambda: ours, len(ours)), samples_per_second(lambda: theirs, 40))
        for _ in range(args.repeats)
    ]
    print(f"batch size {args.batch_size}, {torch.get_num_threads()} threads on {os.cpu_count()} cores")
    print(f"torchvision + ToTensor: {statistics.median(theirs for _, theirs in rates):>12,.0f} samples/s")
    print(f"lightning_mgpu        : {statistics.median(ours for ours, _ in rates):>12,.0f} samples/s")
    print(f"ratio                 : {statistics.median(ours / theirs for ours, theirs in rates):>12,.0f} times")


if __name__ == "__main__":
    main()
