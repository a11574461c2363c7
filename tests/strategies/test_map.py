"""The map in strategies/__init__.py names functions that are where it says."""

import re
from pathlib import Path

import pytest

from lightning_mgpu import strategies

PACKAGE = Path(strategies.__file__).parents[1]
STOPS = re.findall(r" ?\d+\. +([\w.]+) .* ([\w/]+\.py)$", strategies.__doc__ or "", re.MULTILINE)
assert len(STOPS) == 13


@pytest.mark.parametrize(("name", "file"), STOPS)
def test_stops_are_where_the_map_says(name, file):
    path = PACKAGE / ("distributed" if "/" in file else "strategies") / file
    assert re.search(rf"(def|class) {name.rpartition('.')[2]}\b", path.read_text())
