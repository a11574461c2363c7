"""Images kept as bytes on any device; a whole batch is gathered, augmented and converted there.

A `DataLoader` over single samples spends its time in Python: 256 calls, 256 small conversions, one
`torch.stack`. One gather of uint8 and one conversion do the same work about 100 times faster.
"""

import torch
from torch import Tensor

from lightning_mgpu.data.batches import BatchDataset, BatchIndex
from lightning_mgpu.seeds import new_generator


class InMemoryImages(BatchDataset):
    """uint8 images (N, C, H, W) and labels (N,), from which it makes batches of float images.

    Batches are made on the images' device. If the indices are there too, a step transfers nothing.
    Pixels are scaled to [0, 1] as by torchvision's `ToTensor`, then normalised by `mean` and `std`.
    The random numbers of `augment` and `cut_out` depend on the seed, the epoch and the sample
    alone, not on batches or devices.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        mean: float = 0.0,
        std: float = 1.0,
        crop_padding: int = 0,
        flip: bool = False,
        cutout: int = 0,
        seed: int = 0,
    ) -> None:
        self.images, self.labels = images, labels
        self.mean, self.std = mean, std
        self.crop_padding, self.flip, self.cutout, self.seed = crop_padding, flip, cutout, seed
        self._epoch, self._uniforms = -1, torch.empty(0)  # the last epoch's numbers, see below

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: BatchIndex) -> tuple[Tensor, Tensor]:
        epoch, indices = index
        indices = indices.to(self.images.device, non_blocking=True)
        # (B, C, H, W) uint8; far faster than `images[indices]`
        X = self.images.index_select(0, indices)
        if self.crop_padding or self.flip:
            X = augment(X, self._uniforms_of(epoch)[indices, :3], self.crop_padding, self.flip)
        X = X.to(torch.float32).div_(255)
        if (self.mean, self.std) != (0.0, 1.0):
            X = X.sub_(self.mean).div_(self.std)
        if self.cutout:
            X = cut_out(X, self._uniforms_of(epoch)[indices, 3:], self.cutout)
        return X, self.labels.index_select(0, indices)

    def _uniforms_of(self, epoch: int) -> Tensor:
        """Uniform numbers (N, 5) of every image in an epoch: 3 for `augment`, 2 for `cut_out`."""
        if self._epoch != epoch:
            generator = new_generator(self.seed, "augmentation", epoch)
            uniforms = [torch.rand(len(self), n, generator=generator) for n in (3, 2)]
            self._epoch, self._uniforms = epoch, torch.cat(uniforms, 1).to(self.images.device)
        return self._uniforms


def augment(X: Tensor, uniforms: Tensor, padding: int, flip: bool) -> Tensor:
    """Random crop after zero padding, and horizontal flip with probability 1/2, as one gather.

    Args:
        X: Images (B, C, H, W).
        uniforms: Uniform numbers in [0, 1) (B, 3): row offset, column offset, flip.
        padding: Pixels added on every side before a window of H x W is cut out.
    """
    B, _, H, W = X.shape
    device = X.device
    X = torch.nn.functional.pad(X, [padding] * 4)
    offsets = (uniforms[:, :2] * (2 * padding + 1)).long()  # (B, 2), in 0 .. 2 padding
    rows = offsets[:, :1] + torch.arange(H, device=device)  # (B, H)
    columns = torch.arange(W, device=device).expand(B, W)
    if flip:
        columns = torch.where(uniforms[:, 2:] < 0.5, columns.flip(1), columns)
    columns = offsets[:, 1:] + columns  # (B, W)
    batch = torch.arange(B, device=device)[:, None, None]
    # indexing the other dimensions with tensors puts the channels last: move them back
    return X[batch, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def cut_out(X: Tensor, uniforms: Tensor, size: int) -> Tensor:
    """Set a square of every image to zero, in place (Cutout: DeVries and Taylor, 2017).

    Args:
        X: Images (B, C, H, W), normalised: zero is the mean.
        uniforms: Uniform numbers in [0, 1) (B, 2): the row and the column of the square's centre.
            The square may stick out of the image.
        size: Pixels of the square's side.
    """
    inside = []  # (B, H), (B, W)
    for n, centres in zip(X.shape[2:], uniforms.split(1, dim=1)):
        # (B, n): pixels from the square's first one
        offset = torch.arange(n, device=X.device) - ((centres * n).long() - size // 2)
        inside.append((offset >= 0) & (offset < size))
    return X.masked_fill_((inside[0][:, :, None] & inside[1][:, None, :])[:, None], 0)
