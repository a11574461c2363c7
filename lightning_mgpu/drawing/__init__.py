"""The messages of an allreduce: counted, drawn and predicted (command: cli.py). Droppable."""

from lightning_mgpu.drawing.picture import draw
from lightning_mgpu.drawing.trace import predict, trace

__all__ = ["draw", "predict", "trace"]
