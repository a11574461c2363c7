"""What a strategy keeps from step to step goes into checkpoints: a resumed run goes on as if it had not stopped.

Lightning saves the state of modules, optimizers, callbacks and precision plugins, but not of strategies.
"""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

KEY = "lightning_mgpu_strategy"


class OwnState:
    """Saves `state_dict` with the optimizers' states, and loads it with them when a run goes on.

    A strategy of another name leaves the state out, with a warning.
    """

    def state_dict(self) -> dict[str, Any]:
        """What there is to keep (the residuals of error feedback, say): tensors and plain values. Here nothing."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take back what `state_dict` gave, perhaps on another number of devices. Tensors come on the CPU."""

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if "optimizer_states" in checkpoint and type(self).state_dict is not OwnState.state_dict:
            checkpoint[KEY] = {"strategy": _name(self), "state": self.state_dict()}
        super().save_checkpoint(checkpoint, *args, **kwargs)  # type: ignore[misc]

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]
        if (saved := checkpoint.get(KEY)) is None:
            return
        if saved["strategy"] == _name(self):
            self.load_state_dict(saved["state"])
        else:
            rank_zero_warn(f"The checkpoint has a state of {saved['strategy']}, which {_name(self)} leaves out.")


def _name(strategy: Any) -> str:
    return f"{type(strategy).__module__}.{type(strategy).__qualname__}"
