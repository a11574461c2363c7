"""Messages of Lightning's that a run on a GPU, or beside one, would show: exactly those are filtered."""

import logging
import warnings

import pytest
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_mgpu.cli.main import quieten

LINES = {
    "You are using a CUDA device ('NVIDIA H100') that has Tensor Cores. To properly utilize them, ...": False,
    "LOCAL_RANK: 0 - CUDA_VISIBLE_DEVICES: [0]": False,
    "[rank: 1] LOCAL_RANK: 1 - CUDA_VISIBLE_DEVICES: [0,1]": False,
    "Metric val_loss did not improve in the last 3 records.": True,
}


@pytest.mark.parametrize("line", LINES)
def test_lines_on_a_gpu(line: str) -> None:
    quieten()
    for name in ("lightning.pytorch", "lightning.fabric"):
        record = logging.LogRecord(name, logging.INFO, "file", 1, line, (), None)
        handlers = logging.getLogger(name).handlers
        assert handlers and all(bool(handler.filter(record)) == LINES[line] for handler in handlers)


def test_a_cpu_run_beside_a_gpu() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quieten()
        rank_zero_warn("GPU available but not used. You can set it by doing `Trainer(accelerator='gpu')`.")
        rank_zero_warn("another warning")
    assert [str(each.message) for each in caught] == ["another warning"]
