"""`malloc=keep`: memory freed in one step is there in the next."""

import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, torch
if sys.argv[1] == "keep":
    from lightning_mgpu.malloc import keep_freed_memory
    keep_freed_memory()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def step():  # 40 MB, more than glibc's largest threshold
    return torch.zeros(10_000_000).add_(1).sum()

counts = []
for _ in range(9):
    before = faults()
    step()
    counts.append(faults() - before)
print(sorted(counts)[4])
"""


def faults(malloc: str) -> int:
    """Page faults of a step, the median: the kernel may take pages back on its own now and then."""
    command = [sys.executable, "-c", SCRIPT, malloc]
    return int(subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs glibc")
def test_no_page_faults_from_the_second_step_on() -> None:
    assert faults("default") > 1000
    assert faults("keep") < 10
