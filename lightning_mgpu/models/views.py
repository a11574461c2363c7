"""Test-time augmentation: a network's mean answer to several views of every image.

    --model.flip_tta=true                          # 2 views: the image and its mirror image
    --model.shift_tta=true                         # 3: as it is, and moved by one pixel along the diagonal, both ways
    --model.flip_tta=true --model.shift_tta=true   # all 6, as in airbench (Jordan, 2024)

Training does not pay for it; evaluation takes 2, 3 or 6 times as long.
"""

from collections.abc import Callable

from torch import Tensor


def mean_over_views(net: Callable[[Tensor], Tensor], X: Tensor, flip: bool, shift: bool) -> Tensor:
    """Logits for images X, the mean of its views'.

    Moved images count a quarter each, the one in place a half (airbench). What is moved in is the darkest value of the
    image: its background, where the images are of things on black, whatever the normalisation.

    Args:
        net: From images (N, C, H, W) to logits (N, num_classes).
    """
    views = [(1.0, X)]
    if shift:
        views = [(0.5, X), (0.25, moved(X, 1)), (0.25, moved(X, -1))]
    if flip:
        views = [(weight / 2, V) for weight, view in views for V in (view, view.flip(-1))]
    # one after another: the shape is that of training, so a compiler compiles for no other, and memory suffices
    return sum(weight * net(view) for weight, view in views)  # type: ignore[return-value]


def moved(X: Tensor, pixels: int) -> Tensor:
    """Images (N, C, H, W) moved down and to the right, by a negative number up and to the left."""
    n = abs(pixels)
    out = X.amin((1, 2, 3), keepdim=True).expand_as(X).clone()
    to, source = (slice(n, None), slice(None, -n)) if pixels > 0 else (slice(None, -n), slice(n, None))
    out[:, :, to, to] = X[:, :, source, source]
    return out
