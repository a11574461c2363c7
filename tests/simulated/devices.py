"""Devices `sim:0`, `sim:1`, ... for tests of what only differing devices show, where there are no GPUs.

    python -m pytest -p tests.simulated.devices tests/strategies/test_parity.py

As a pytest plugin it lets every `Trainer(accelerator="cpu")` of the tests run on simulated devices, if on one alone.
As with GPUs, tensors on different devices cannot be mixed, nor with the CPU's, and autograd has a thread a device.
Unlike GPUs, they have no streams, and what `UNLIKE_GPUS` lists.
"""

import ctypes
import functools
import hashlib
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy

UNLIKE_GPUS = {
    "test_low": "no autocast",
    "test_scaled_gradients": "no autocast",
    "test_precision_modes_in_every_replica": "no autocast",
    "test_sparse_gradients": "no sparse tensors",
    "test_nested_tensors_go_whole_to_one_device": "no nested tensors",
    "test_forward_mode_derivatives": "no forward-mode AD",
    "test_a_scripted_layer": "no TorchScript",
    "test_weight_averaging": "no average of integers",
    "test_subclasses_and_attributes_of_batch_tensors": "a tensor's attributes do not come along to a device",
    "test_a_fit_gives_the_cores_back": "replicas do not share the CPU's cores",
    "test_weights_without_an_optimizer": "nobody moves tensors in a list",
    "test_shared_storage": "devices share no storage",
    "test_odd_tensors_that_validation_sets": "none on them",
}
TORCH = Path(torch.__file__).parent
SOURCE = Path(__file__).with_name("devices.cpp")


def build() -> Path:
    """Compile the devices, 20 s on a CPU core, into `build/`; once for a version of them and of torch."""
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = SOURCE.with_name("build") / f"{key}.so"
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        unfinished = library.with_suffix(f".{os.getpid()}")
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
        options = ["-std=c++20", "-O1", "-fPIC", "-shared", abi, f"-I{TORCH / 'include'}", f"-L{TORCH / 'lib'}"]
        libraries = ["-ltorch", "-ltorch_cpu", "-lc10"]
        subprocess.run(["g++", *options, str(SOURCE), "-o", str(unfinished), *libraries], check=True)
        unfinished.replace(library)
    return library


def register() -> None:
    """Make `torch.device("sim")` known, with what torch and Lightning ask of `torch.sim`."""
    torch.utils.rename_privateuse1_backend("sim")
    path = str(build())
    torch.ops.load_library(path)
    library = ctypes.CDLL(path)

    @contextmanager
    def device(name: Any) -> Iterator[None]:
        before = library.current_device()
        library.set_device(index_of(name))
        try:
            yield
        finally:
            library.set_device(before)

    def index_of(name: Any) -> int:
        index = torch.device(name).index
        return library.current_device() if index is None else index

    def manual_seed_all(seed: int) -> None:
        for i in range(library.num_devices()):
            torch.ops.sim.manual_seed(seed, i)

    module: Any = ModuleType("torch.sim")
    vars(module).update(
        device=device,
        device_count=library.num_devices,
        current_device=library.current_device,
        set_device=lambda name: library.set_device(index_of(name)),
        synchronize=lambda device=None: None,
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        _lazy_init=lambda: None,
        manual_seed=lambda seed: torch.ops.sim.manual_seed(seed, library.current_device()),
        manual_seed_all=manual_seed_all,
        get_rng_state=lambda device="sim": torch.ops.sim.get_rng_state(index_of(device)),
        set_rng_state=lambda state, device="sim": torch.ops.sim.set_rng_state(state, index_of(device)),
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
    )
    torch._register_device_module("sim", module)
    torch.utils.generate_methods_for_privateuse1_backend()


class SimulatedAccelerator(Accelerator):
    """Simulated devices for a Trainer."""

    def setup_device(self, device: torch.device) -> None: ...

    def teardown(self) -> None: ...

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {}

    @staticmethod
    def parse_devices(devices: Any) -> list[int]:
        return list(range(int(devices)))

    @staticmethod
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("sim", i) for i in devices]

    @staticmethod
    def auto_device_count() -> int:
        return 2

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "sim"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        reason = UNLIKE_GPUS.get(getattr(item, "originalname", ""))
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"on simulated devices: {reason}"))


def pytest_configure() -> None:
    register()
    init = Trainer.__init__

    @functools.wraps(init)
    def on_simulated_devices(self: Trainer, **kwargs: Any) -> None:
        devices, strategy = kwargs.get("devices", 1), kwargs.get("strategy", "auto")
        names_its_own = devices == 1 and not isinstance(strategy, str)
        if kwargs.get("accelerator") == "cpu" and not names_its_own:
            kwargs["accelerator"] = SimulatedAccelerator()
            if devices == 1 and strategy == "auto":
                kwargs["strategy"] = SingleDeviceStrategy("sim:0")
        init(self, **kwargs)

    Trainer.__init__ = on_simulated_devices  # type: ignore[method-assign]
