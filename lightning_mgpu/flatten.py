"""A nested configuration as one row of a table: `{"trainer": {"max_epochs": 10}}` -> `{"trainer.max_epochs": 10}`."""

from collections.abc import Iterator
from typing import Any


def flatten(config: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys, as on the command line, to plain values; the items of a list of mappings are numbered."""
    return dict(_items("", config))


def _items(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
        value = dict(enumerate(value))
    if not isinstance(value, dict) or not value:
        yield key, value
        return
    for name, item in value.items():
        yield from _items(f"{key}.{name}" if key else str(name), item)
