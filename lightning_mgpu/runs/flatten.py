"""A nested configuration as one row of a table, under the names of the command line."""

from collections.abc import Iterator
from typing import Any


def flatten(config: dict[str, Any]) -> dict[str, Any]:
    """`{"model": {"class_path": "LeNet", "init_args": {"lr": 0.1}}}` -> `{"model": "LeNet", "model.lr": 0.1}`.

    The items of a list of mappings are numbered.
    """
    return dict(_items("", config))


def _items(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        value = dict(enumerate(value))
    if not isinstance(value, dict) or not value:
        yield key, value
        return
    for name, item in value.items():
        part = "" if name in ("class_path", "init_args") else f".{name}"  # which no flag has in its name
        yield from _items(f"{key}{part}".lstrip("."), item)
