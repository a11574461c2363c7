"""What `self.log(batch_size=...)` means in a step that was split, which nobody says: samples, a count or a constant."""

from collections.abc import Sequence
from typing import Any


class BatchSizes:
    """What was given so far, by the name of the value it weighs."""

    def __init__(self) -> None:
        # The last one that all replicas gave, the sizes of the shards it was given for, and what it made in all
        self._equal: dict[str, tuple[Any, set[int], Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._equal)

    def of_batch(self, name: str, given: Sequence[Any], sizes: Sequence[int]) -> tuple[Sequence[float], Any]:
        """Weights for the shards, and what one device would have given, up to a factor that never changes.

        It counts what is in the shard (samples, tokens), and adds up; but the same for shards of different sizes, in
        this step or in others, is a constant, which weighs every batch alike.

        Args:
            name: Of the logged value.
            given: `batch_size` of each replica that had samples.
            sizes: Samples of their shards.
        """
        total, known_sizes = sum(given), set(sizes)
        if len(set(given)) > 1:
            self._equal.pop(name, None)
            return given, total
        value, sizes_then, total_then = self._equal.get(name, (None, set(), None))
        if value == given[0]:
            known_sizes |= sizes_then
            total = total_then if len(known_sizes) > 1 else total
        self._equal[name] = given[0], known_sizes, total
        return sizes, total
