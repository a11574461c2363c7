"""Count and draw the messages of an allreduce, and predict its time. Can be deleted."""

from lightning_mgpu.lab.tracing.picture import draw
from lightning_mgpu.lab.tracing.trace import predict, trace

__all__ = ["draw", "predict", "trace"]
