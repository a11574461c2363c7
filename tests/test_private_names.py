from pathlib import Path

import lightning_mgpu
from tests.private_names import NAMES, private_names


def test_the_list_has_all_private_names_and_no_others() -> None:
    assert private_names(Path(lightning_mgpu.__file__).parent) == NAMES.keys()
    assert len(NAMES) <= 20
