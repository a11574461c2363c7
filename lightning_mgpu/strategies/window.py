"""The batches of one update."""

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_mgpu.routes.buckets import Gradients


class Window:
    """Gradients of the batches of one update, which are summed here and exchanged at its end.

    Every batch counts alike: Lightning divides each loss by their number. If losses have weights,
    the gradient of the window is the weighted mean over its batches.

    Args:
        num_local: Replicas of this process. Each has gradients of its own.
        num_batches: By which Lightning divides each loss.
        epoch: In which the window has begun. It does not reach into the next one.
    """

    def __init__(self, num_local: int, num_batches: int, epoch: int) -> None:
        self.gradients: list[Gradients] = [{} for _ in range(num_local)]
        self.num_batches, self.epoch = num_batches, epoch
        self.has_weights: bool | None = None  # all losses of a window, or none
        self.weight = 0.0  # of all batches so far
        self.part = 1.0  # by which their gradients count from the next batch on
        self.shares, self.total = [0.0] * num_local, 0.0  # of the replicas here, and of all
        self.earlier: Gradients | None = None  # what parameters had before its first batch

    def add(self, shares: list[float], weight: float | None) -> list[float]:
        """Count a batch, by its shards' shares and its weight; returns the factors of its losses.

        Raises:
            ValueError: If a loss of the window has a weight, and another one has none.
        """
        if self.has_weights not in (None, weight is not None):
            raise ValueError("Only some losses have a weight: all of an update need one, or none.")
        self.has_weights, part, factor = weight is not None, 1.0, 1.0
        if weight is not None:
            before, self.weight = self.weight, self.weight + weight
            part = before / self.weight if self.weight else 1.0
            factor = self.num_batches * (1 - part)
        self.part, factors = part, [share * factor for share in shares]
        self.shares = [old * part + new for old, new in zip(self.shares, factors)]
        self.total = self.total * part + factor
        return factors

    @property
    def mean_shares(self) -> list[float]:
        return [share / self.total if self.total else 0.0 for share in self.shares]

    def open(self, parameters: list[Tensor]) -> None:
        """Before a backward pass: the first replica's gradients so far are those of parameters.

        Raises:
            MisconfigurationException: If a hook has edited one of several replicas' gradients.
        """
        if self.earlier is None:
            self.earlier = get_gradients(parameters)
        elif len(self.gradients) == 1:
            self.gradients = [get_gradients(parameters)]  # as hooks have left them
        elif versions_of(get_gradients(parameters)) != self.versions:
            raise MisconfigurationException(
                "A hook has edited gradients that are still being accumulated, of one of several "
                "replicas here: edit them in the last batch of a window, or leave out `replicas`."
            )
        if self.part != 1:
            part, self.part = self.part, 1.0
            self.gradients = [{p: g * part for p, g in each.items()} for each in self.gradients]
        set_gradients(parameters, self.gradients[0])

    def keep(self, gradients: list[Gradients]) -> None:
        """After a backward pass: the gradients of each replica."""
        self.gradients = gradients
        self.versions = versions_of(gradients[0])


def versions_of(gradients: Gradients) -> list[tuple[int, int]]:
    """They change when a gradient is replaced, or edited in place."""
    return [(id(gradient), gradient._version) for gradient in gradients.values()]


def get_gradients(parameters: list[Tensor]) -> Gradients:
    return {p: p.grad for p in parameters if p.grad is not None}


def set_gradients(parameters: list[Tensor], gradients: Gradients) -> None:
    for p in parameters:
        p.grad = gradients.get(p)
