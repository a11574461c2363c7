"""Output of a run (header, epoch lines, pictures, predictions), searches, and faster models."""

from lightning_mgpu.callbacks.console import EpochLines
from lightning_mgpu.callbacks.epoch_timer import EpochTimer
from lightning_mgpu.callbacks.fast_model import FastModel
from lightning_mgpu.callbacks.header import RunHeader
from lightning_mgpu.callbacks.ignored_weight import IgnoredWeight
from lightning_mgpu.callbacks.learning_curve import LearningCurve
from lightning_mgpu.callbacks.learning_rates import LearningRates
from lightning_mgpu.callbacks.pictures import TestPictures
from lightning_mgpu.callbacks.predictions import PredictionWriter
from lightning_mgpu.callbacks.search import BatchSizeSearch, LearningRateSearch, is_search

__all__ = [
    "BatchSizeSearch",
    "EpochLines",
    "EpochTimer",
    "FastModel",
    "IgnoredWeight",
    "LearningCurve",
    "LearningRateSearch",
    "LearningRates",
    "PredictionWriter",
    "RunHeader",
    "TestPictures",
    "is_search",
]
