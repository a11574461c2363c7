"""What people look at: the run in a few lines, epoch times, the learning curve, predicted images."""

from lightning_mgpu.callbacks.console import EpochLines, RunHeader
from lightning_mgpu.callbacks.epoch_timer import EpochTimer
from lightning_mgpu.callbacks.learning_curve import LearningCurve
from lightning_mgpu.callbacks.predictions import PredictionGrid, PredictionWriter
from lightning_mgpu.callbacks.run_directory import run_directory

__all__ = [
    "EpochLines",
    "EpochTimer",
    "LearningCurve",
    "PredictionGrid",
    "PredictionWriter",
    "RunHeader",
    "run_directory",
]
