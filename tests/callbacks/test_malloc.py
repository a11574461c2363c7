"""`malloc=keep`: memory freed in one step is there in the next."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, torch
from lightning_mgpu.callbacks.malloc import keep_freed_memory
keep_freed_memory()

def held():  # MB of address space: what malloc asked for, whatever the kernel does with the pages behind it
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize() / 1e6

for million in (10, 20, 30, 40, 50):  # 40 to 200 MB, each more than glibc's largest threshold
    torch.zeros(million * 1_000_000)
before = held()
tensor = torch.zeros(25_000_000)  # half the largest: small things may have taken a little of that
print(held() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_what_a_step_frees_is_there_in_the_next() -> None:
    """A tensor of 100 MB takes nothing from the kernel after larger ones were freed."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100, check=True)
    assert float(done.stdout) == 0
