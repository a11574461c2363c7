"""What a strategy puts in the place of a layer's `forward` for as long as it trains: every replica's layer has its own.

The layer's class stays, and so do its keys in checkpoints.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from lightning_mgpu.strategies.threads.team import Team


class OwnForward:
    """Called instead of `forward`; a copied or unpickled layer has what it had before, that of its class mostly."""

    def __init__(self, layer: nn.Module, team: Team) -> None:
        self.layer, self.team = layer, team
        self.before: Callable[..., Any] | None = vars(layer).get("forward")  # where somebody has put another

    @property
    def forward(self) -> Callable[..., Any]:
        """The layer's."""
        return self.before or partial(type(self.layer).forward, self.layer)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (self.before,) if self.before else (type(self.layer).forward, self.layer)


def give_back(layers: Iterable[nn.Module]) -> None:
    """Let layers have the `forward` they had before."""
    for layer in layers:
        own = vars(layer).get("forward")
        if isinstance(own, OwnForward):
            if own.before:
                vars(layer)["forward"] = own.before
            else:
                del vars(layer)["forward"]
