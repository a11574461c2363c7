"""Facts that processes must have alike, compared when they meet."""

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import numpy as np
from lightning.pytorch.strategies import DDPStrategy

from lightning_mgpu.shards.checksum import checksum

DIFFER = "the processes do not run the same program"
FACTS = {
    "seed": "draws other random numbers. Call seed_everything first, and draw as many everywhere",
    "batches": "has other batches. Seed all alike, and do not split a dataset by rank",
    "dataset": "has another dataset. Do not split it by rank, and seed what makes it",
    "parameters": "has other parameters that require a gradient, or in another layout",
    "names": "logs other values than {names}. Log the same ones in every batch",
}
"""Facts that the processes compare in every step, and the words for one that differs."""


class MeetingStrategy(DDPStrategy):
    """Processes that compare what they train on, and their weights."""

    facts = FACTS
    meeting: Any = None  # a `Meeting`, once all processes are there
    given_shards: Sequence[Any] = ()  # of the running batch, of each loader that has not ended
    why_weights_differ = (
        "an edit that depends on the rank, a value logged without sync_dist=True, or "
        "`loss.backward()` in the place of `self.manual_backward(loss)`"
    )

    @property
    def module(self) -> Any:
        return self.lightning_module

    @property
    def is_alone(self) -> bool:
        """Whether there is one process, of one replica or of several."""
        return self.world_size == 1

    def compare_facts(self, purpose: str, names: Sequence[str] = (), **own: int) -> None:
        """A meeting that compares what processes must have alike: the `own` values are of `facts`.

        Raises:
            RuntimeError: If processes differ in one of the facts.
        """
        row = self.facts_to_row((), names, **own)
        self.check_facts(self.meeting.gather(row, purpose), names)

    def facts_to_row(
        self, beside: Sequence[int] | np.ndarray, names: Sequence[str], **own: int
    ) -> np.ndarray:
        """What this process brings to a meeting, in bytes: (n,)."""
        facts = dict.fromkeys(self.facts, 0) | {"names": crc32(repr(names).encode())} | own
        for each in self.given_shards:
            for name, value in each.facts.items():
                facts[name] += value
        mine = np.array([*facts.values()])
        return np.concatenate([mine.view(np.uint8), np.asarray(beside, np.uint8)])

    def check_facts(self, rows: np.ndarray, names: Sequence[str] = ()) -> np.ndarray:
        """The bytes beside the facts, if all processes have brought the same facts."""
        facts, beside = np.split(rows, [8 * len(self.facts)], axis=1)
        numbers = np.ascontiguousarray(facts).view(np.int64)
        for process, i in np.argwhere(numbers != numbers[self.global_rank]).tolist():
            reason = [*self.facts.values()][i].format(names=names)
            raise RuntimeError(f"{DIFFER}: process {process}, not {self.global_rank}, {reason}.")
        return beside

    def compare_weights(self) -> None:
        """Raise a RuntimeError if processes hold other weights or buffers."""
        if self.is_alone:
            return
        tensors = dict([*self.module.named_parameters(), *self.module.named_buffers()])
        digests = self.meeting.gather(np.array([*map(checksum, tensors.values())]), "weights")
        for process, i in np.argwhere(digests != digests[0]).tolist():
            raise RuntimeError(
                f"{DIFFER}: {[*tensors][i]} of process {process} is not that of process 0, by "
                f"{self.why_weights_differ}."
            )

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.compare_weights()
        super().save_checkpoint(*args, **kwargs)

    def on_train_end(self) -> None:
        self.compare_weights()
