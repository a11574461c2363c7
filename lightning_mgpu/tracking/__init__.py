"""Experiment tracking: Weights & Biases with an honest offline default, beside the CSV files every run writes."""

from lightning_mgpu.tracking.best_model import UploadBest
from lightning_mgpu.tracking.git import code_version
from lightning_mgpu.tracking.weights_and_biases import Tracking, finish, save_file, saved_run_id, start_run

__all__ = ["Tracking", "UploadBest", "code_version", "finish", "save_file", "saved_run_id", "start_run"]
