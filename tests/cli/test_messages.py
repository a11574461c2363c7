"""Messages of other packages that say nothing to a user are filtered, and no others."""

import subprocess
import sys

SCRIPT = """
import warnings
from unittest import mock

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_mgpu.cli.main import hide_messages

hide_messages()
faked = {
    "is_available": lambda: True,
    "device_count": lambda: 1,
    "get_device_capability": lambda device: (9, 0),
    "get_device_name": lambda device: "a GPU",
    "set_device": lambda device: None,
}
with mock.patch.multiple(torch.cuda, **faked):
    Trainer(accelerator="cpu", devices=1, logger=False)
    accelerator = Trainer(accelerator="gpu", devices=1, logger=False).accelerator
    accelerator.setup_device(torch.device("cuda", 0))
    accelerator.set_nvidia_flags(local_rank=0)
rank_zero_info("information")
warnings.warn("a warning")
"""


def test_what_lightning_says_of_a_gpu_is_filtered() -> None:
    """Messages about Tensor Cores, about visible devices, and about a run on the CPU."""
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    shown = (done.stdout + done.stderr).splitlines()
    assert [line.rpartition(": ")[2] for line in shown] == ["information", "a warning"], shown
