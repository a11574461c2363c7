"""Callbacks for output: header, epoch lines, pictures and predictions."""

from lightning_mgpu.callbacks.output import RunOutput
from lightning_mgpu.callbacks.pictures import TestPictures
from lightning_mgpu.callbacks.predictions import PredictionWriter

__all__ = ["PredictionWriter", "RunOutput", "TestPictures"]
