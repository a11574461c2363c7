"""An allreduce counted, drawn and predicted; `cli.py` has the command. Can be deleted."""

from lightning_mgpu.drawing.picture import draw
from lightning_mgpu.drawing.trace import trace

__all__ = ["draw", "trace"]
