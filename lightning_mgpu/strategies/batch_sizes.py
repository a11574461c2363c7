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
        are_equal = len(set(given)) == 1
        value, known_sizes, total = self._equal.get(name, (None, set(), None))
        if not are_equal or value != given[0]:
            known_sizes, total = set(), sum(given)
        known_sizes = known_sizes | set(sizes)
        is_constant = are_equal and len(known_sizes) > 1
        if not is_constant:
            total = sum(given)
        if are_equal:
            self._equal[name] = given[0], known_sizes, total
        else:
            self._equal.pop(name, None)
        return (sizes, total) if is_constant else (given, total)
