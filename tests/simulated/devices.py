"""Devices `sim:0`, `sim:1`, ... that differ as GPUs do, for tests on machines without GPUs.

    python -m pytest -p tests.simulated.devices tests/strategies/test_dp.py

As a pytest plugin it lets the tests' `Trainer(accelerator="cpu")` run on simulated devices.
As on GPUs, tensors of different devices cannot be mixed, nor with the CPU's. Autograd has a
thread per device. Each device has its own random numbers. Autocast and GradScalers work.

These devices lack what GPUs have: streams (all work is done when a call returns, so no test
here finds a missing `synchronize` or a race), kernels and speed of their own (the CPU's run, to the
bit), a limit of memory, collectives, CUDA's name, sparse tensors, fused recurrent cells. They exist
in one process. Tests of these are marked `gpu`.
"""

import functools
import hashlib
import os
import subprocess
from pathlib import Path
from types import ModuleType

import torch

TORCH = Path(torch.__file__).parent
SOURCE = Path(__file__).with_name("devices.cpp")
NUM_DEVICES = 8  # as there


def build():
    """Compile the devices into `build/`, once per version of them and of torch (20 s)."""
    key = hashlib.sha256(SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:16]
    library = SOURCE.with_name("build") / f"{key}.so"
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
        unfinished = library.with_suffix(f".{os.getpid()}")
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
        options = ["-std=c++20", "-O1", "-fPIC", "-shared", abi, f"-I{TORCH / 'include'}"]
        libraries = [f"-L{TORCH / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
        line = ["g++", *options, str(SOURCE), "-o", str(unfinished), *libraries]
        subprocess.run(line, check=True)
        unfinished.replace(library)
    return library


def register():
    """Make `torch.device("sim")` known, with what torch and Lightning ask of `torch.sim`."""
    torch.utils.rename_privateuse1_backend("sim")
    torch.ops.load_library(str(build()))
    here, ops = torch.accelerator, torch.ops.sim

    def index_of(device):
        index = torch.device(device).index
        return here.current_device_index() if index is None else index

    def manual_seed_all(seed):
        for i in range(NUM_DEVICES):
            ops.manual_seed(seed - 2**64 if seed >= 2**63 else seed, i)

    module = ModuleType("torch.sim")
    vars(module).update(
        device=lambda device: here.device_index(torch.device(device).index),
        device_count=lambda: NUM_DEVICES,
        get_device_name=lambda device=None: "simulated device",
        synchronize=lambda device=None: None,
        is_available=lambda: True,
        is_initialized=lambda: True,
        _is_in_bad_fork=lambda: False,
        manual_seed_all=manual_seed_all,
        get_rng_state=lambda device="sim": ops.get_rng_state(index_of(device)),
        get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
        set_rng_state=lambda state, device="sim": ops.set_rng_state(state, index_of(device)),
    )
    torch._register_device_module("sim", module)


def pytest_load_initial_conftests():
    register()  # before a conftest.py asks for the devices


def pytest_configure():
    """Let Trainers on the CPU run on simulated devices.

    Those stay there that start processes, and those whose strategy names its own devices.
    """
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import SingleDeviceStrategy

    import tests.simulated.accelerator  # noqa: F401

    init = Trainer.__init__

    @functools.wraps(init)
    def on_simulated_devices(self, **kwargs):
        strategy, has_one = kwargs.get("strategy", "auto"), str(kwargs.get("devices", 1)) == "1"
        is_dp = strategy == "dp" or hasattr(strategy, "device_shares")
        names_its_own = bool(getattr(strategy, "parallel_devices", None))
        names_its_own |= isinstance(strategy, SingleDeviceStrategy) and not is_dp
        has_processes = str(strategy).startswith("ddp") or not (has_one or is_dp)
        if kwargs.get("accelerator") == "cpu" and not names_its_own and not has_processes:
            kwargs["accelerator"] = "sim"
        init(self, **kwargs)

    Trainer.__init__ = on_simulated_devices
