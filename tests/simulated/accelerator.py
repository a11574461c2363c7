"""`Trainer(accelerator="sim")`, and `--trainer.accelerator=sim` on a command line in a test."""

import torch
from lightning.pytorch.accelerators import AcceleratorRegistry, CPUAccelerator
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector


class SimulatedAccelerator(CPUAccelerator):
    """Simulated devices for a Trainer. As on the CPU, `devices="auto"` is one."""

    def setup_device(self, device):
        torch.accelerator.set_device_index(device.index)

    @staticmethod
    def get_parallel_devices(devices):
        return [torch.device("sim", i) for i in range(devices)]

    @staticmethod
    def name():
        return "sim"


AcceleratorRegistry.register("sim", SimulatedAccelerator, description="simulated devices")

choose_strategy = _AcceleratorConnector._choose_strategy
choose_precision = _AcceleratorConnector._check_and_init_precision


def choose_strategy_for_any_device(self):
    """Lightning's own takes the CPU for one device that is not CUDA's, Apple's or an XLA device."""
    chosen = choose_strategy(self)
    is_one = isinstance(chosen, SingleDeviceStrategy) and self._accelerator_flag == "sim"
    return SingleDeviceStrategy(self._parallel_devices[0]) if is_one else chosen


def choose_precision_for_any_device(self):
    """Lightning's own takes CUDA's autocast for every accelerator but the CPU and Apple's."""
    chosen = choose_precision(self)
    is_mixed = isinstance(chosen, MixedPrecision) and self._accelerator_flag == "sim"
    return MixedPrecision(chosen.precision, "sim") if is_mixed else chosen


_AcceleratorConnector._choose_strategy = choose_strategy_for_any_device
_AcceleratorConnector._check_and_init_precision = choose_precision_for_any_device
