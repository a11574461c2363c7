"""The messages of an allreduce: counted, drawn and predicted (command: cli.py). Droppable."""

from lightning_mgpu.lab.tracing.picture import draw
from lightning_mgpu.lab.tracing.trace import predict, trace

__all__ = ["draw", "predict", "trace"]
