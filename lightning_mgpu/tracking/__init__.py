"""Experiment tracking: Weights & Biases with an honest offline default, beside the CSV files every run writes."""

from lightning_mgpu.tracking.weights_and_biases import Tracking, start_run

__all__ = ["Tracking", "start_run"]
