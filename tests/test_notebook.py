"""docs/multi_gpu.ipynb runs from top to bottom; its outputs are those of such a run."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

REPOSITORY = Path(__file__).parents[1]
PATH = REPOSITORY / "docs" / "multi_gpu.ipynb"


SHORTER = {
    "range(60)": "range(20)",
    "range(10, 61, 10)": "range(10, 21, 10)",
    "steps=10,": "steps=2,",
    "steps=96 // k": "steps=4 // k",
    '"steps": 5': '"steps": 2',
    "range(80)": "range(8)",
    "2560 // batch_size": "256 // batch_size",
    "find_allreduce(function), 16, numel": "find_allreduce(function), 4, numel",
    "(4, 0.02), (4, 0.04), (4, 0.08), (4, 0.16), ": "",
    "    (0.1, 64, 2, 1),\n    (0.1, 128, 1, 1),\n": "",
    "    (0.4, 128, 1, 1),\n": "",
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("shorter", [SHORTER, pytest.param({}, marks=pytest.mark.weekly)])
def test_every_cell_runs(shorter, tmp_path, monkeypatch):
    """Each time with fewer steps and devices than on the page, and weekly as it is."""
    pytest.importorskip("lightning_mgpu.lab.tracing")
    pytest.importorskip("lightning_mgpu.book")
    pytest.importorskip("lightning_mgpu.lab.network")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "TMPDIR"):
        monkeypatch.setenv(name, str(tmp_path))
    notebook = nbformat.read(PATH, as_version=4)
    for long, short in shorter.items():
        assert any(long in cell.source for cell in notebook.cells), long
        for cell in notebook.cells:
            cell.source = cell.source.replace(long, short)
    folder = {"metadata": {"path": str(PATH.parent)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=folder).execute()


def test_outputs_are_of_one_run_and_small():
    cells = [cell for cell in nbformat.read(PATH, as_version=4).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    assert len([output for output in outputs if "image/png" in output.get("data", {})]) >= 6
    assert PATH.stat().st_size < 500_000
