"""'Training on Multiple GPUs' of d2l.ai, from scratch: no Trainer, no strategy, no `nn.Module`.

python -m lightning_mgpu.book --devices 2       # draws book.png and prints the book's summary
"""

import argparse
import time
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_mgpu.allreduce import textbook_allreduce as allreduce
from lightning_mgpu.callbacks.curve import plot_curve
from lightning_mgpu.data import FashionMNIST
from lightning_mgpu.devices import gpus, synchronize

Params = list[Tensor]


def init_params(seed: int = 0) -> Params:
    """The 129,068 parameters of LeNet: weights from N(0, 0.01), zero biases."""
    generator = torch.Generator().manual_seed(seed)
    params = []
    shapes = [((20, 1, 3, 3), 20), ((50, 20, 5, 5), 50), ((800, 128), 128), ((128, 10), 10)]
    for shape, num_outputs in shapes:
        params += [torch.randn(shape, generator=generator) * 0.01, torch.zeros(num_outputs)]
    return params


def lenet(X: Tensor, params: Params) -> Tensor:
    """Logits (B, 10) of images (B, 1, 28, 28)."""
    W1, b1, W2, b2, W3, b3, W4, b4 = params
    h1 = F.avg_pool2d(F.relu(F.conv2d(X, W1, b1)), 2)  # (B, 20, 26, 26), pooled to (B, 20, 13, 13)
    # (B, 50, 9, 9), pooled and flattened to (B, 800)
    h2 = F.avg_pool2d(F.relu(F.conv2d(h1, W2, b2)), 2).flatten(1)
    h3 = F.relu(h2 @ W3 + b3)  # (B, 128)
    return h3 @ W4 + b4  # (B, 10)


def get_params(params: Params, device: torch.device) -> Params:
    """A replica on a device. (Without `clone`, replicas on one device would share tensors.)"""
    return [param.to(device).clone().requires_grad_() for param in params]


def split_batch(
    X: Tensor, y: Tensor, devices: list[torch.device]
) -> tuple[list[Tensor], list[Tensor]]:
    """One shard per device. (In the chapter, 4 devices get 2, 2, 1 and 0 of 5 samples.)"""
    X_shards, y_shards = (
        [shard.to(device, non_blocking=True) for shard, device in zip(shards, devices)]
        for shards in (X.tensor_split(len(devices)), y.tensor_split(len(devices)))
    )
    return X_shards, y_shards


def train_batch(
    X: Tensor, y: Tensor, device_params: list[Params], devices: list[torch.device], lr: float
) -> Tensor:
    """A step on a global batch: k shards, k losses, k gradients, one sum, k identical updates."""
    X_shards, y_shards = split_batch(X, y, devices)
    losses = [  # sums, not means: shards are weighted by their size
        F.cross_entropy(lenet(X_shard, params), y_shard, reduction="sum")
        for X_shard, y_shard, params in zip(X_shards, y_shards, device_params)
    ]
    for loss in losses:  # asynchronous: all GPUs compute at the same time
        loss.backward()
    for replicas in zip(*device_params):  # the k copies of one parameter
        allreduce([replica.grad for replica in replicas])
        with torch.no_grad():
            for replica in replicas:  # sgd, by every device
                replica.sub_(replica.grad, alpha=lr / len(X))  # the mean over the global batch
                replica.grad = None
    return torch.stack([loss.detach().to(devices[0]) for loss in losses]).sum()  # over all samples


@torch.no_grad()
def evaluate_accuracy(batches: Iterable, params: Params) -> float:
    """The accuracy of LeNet on one device, as in the chapter."""
    device = params[0].device
    hits = [lenet(X.to(device), params).argmax(1).cpu() == y for X, y in batches]
    return torch.cat(hits).double().mean().item()


def train(devices: int, batch_size: int, lr: float, num_epochs: int) -> list[Params]:
    """Train on Fashion-MNIST, plot the test accuracy, and return the parameters on every device."""
    data = FashionMNIST(batch_size, val_size=0)
    data.prepare_data()
    data.setup("fit")
    train_iter, test_iter = data.train_dataloader(), data.test_dataloader()
    all_devices = ((gpus() or [torch.device("cpu")]) * devices)[:devices]  # repeated if few
    device_params = [get_params(init_params(), device) for device in all_devices]
    print(f"{len(train_iter)} batches of {batch_size} per epoch; curve: book.png", flush=True)
    seconds, test_accs = 0.0, []
    for epoch in range(num_epochs):
        train_iter.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        seconds -= time.perf_counter()
        loss = torch.zeros((), device=all_devices[0])
        for X, y in train_iter:
            loss += train_batch(X, y, device_params, all_devices, lr)
        synchronize(all_devices)  # the chapter synchronizes one
        seconds += time.perf_counter()
        test_accs.append(evaluate_accuracy(test_iter, device_params[0]))
        values = f"train loss {loss / len(data.train_set):.3f}, test acc {test_accs[-1]:.3f}"
        print(f"epoch {epoch + 1}/{num_epochs}: {values}", flush=True)
        curve = plot_curve({"val_acc": dict(enumerate(test_accs, 1))}, "test", best={})
        curve.savefig("book.png", dpi=110)
    print(f"test acc: {test_accs[-1]:.2f}, {seconds / num_epochs:.1f} sec/epoch on {all_devices}")
    return device_params


def main(args: list[str] | None = None) -> None:
    """Entry point of `python -m lightning_mgpu.book`."""
    defaults = argparse.ArgumentDefaultsHelpFormatter
    about = "Train LeNet from scratch as in the chapter, and draw book.png after every epoch."
    parser = argparse.ArgumentParser("lightning_mgpu.book", None, about, formatter_class=defaults)
    add = parser.add_argument
    add("--devices", type=int, default=2, help="number of GPUs, or of replicas on the CPU")
    add("--batch_size", type=int, default=256, help="global batch size, split over the devices")
    add("--lr", type=float, default=0.2, help="learning rate")
    add("--num_epochs", type=int, default=10, help="number of epochs")
    train(**vars(parser.parse_args(args)))


if __name__ == "__main__":
    main()
