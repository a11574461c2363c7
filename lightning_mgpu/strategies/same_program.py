"""All processes run the same program on the same batches: what each computes with is compared."""

from typing import Any

import torch

from lightning_mgpu.strategies.equality import digest_batch, digest_of_all
from lightning_mgpu.strategies.launching import refuse_process_groups
from lightning_mgpu.strategies.processes import Processes
from lightning_mgpu.strategies.records import Record
from lightning_mgpu.strategies.replicas import Replicas
from lightning_mgpu.strategies.split_batch import leaves

SAMPLE = 4096  # elements of each tensor in a batch, compared between processes in every step
Digests = dict[str, list[int]]  # by what they tell of


def digest_step(batch: Any, replicas: Replicas, is_check_due: bool) -> Digests:
    """What must be the same for a step: a sample of the batch, or all of it, and the weights."""
    counts = [len(replicas.parameter_sets), len(replicas.buffer_sets)]
    if not is_check_due:
        return {"number of tensors": counts, "batch": digest_batch(leaves(batch), SAMPLE)}
    refuse_process_groups()
    digests = {"number of tensors": counts, "batch": digest_batch(leaves(batch))}
    return digests | digest_weights(replicas)


def digest_weights(replicas: Replicas) -> Digests:
    parameters, buffers = replicas.parameter_sets.values(), replicas.buffer_sets.values()
    return {
        "weights": [digest_of_all(first for first, *_ in parameters)],
        "buffers": [digest_of_all(first for first, *_ in buffers)],
        "random state": [digest_of_all([torch.get_rng_state()])],
    }


def share_records(
    processes: Processes, where: str, records: dict[int, Record], digests: Digests
) -> dict[int, Record]:
    """The records of all processes' replicas, in order.

    Raises:
        RuntimeError: If the digests of a process differ.
    """
    shared = processes.share(where, (records, digests))
    for i, (_, others) in enumerate(shared):
        if wrong := [name for name, digest in others.items() if digest != digests[name]]:
            raise RuntimeError(
                f"process {i} differs from process {processes.rank} in its {wrong[0]}, in "
                f"{where}: all must run the same program, with the same seed and batches."
            )
    return {i: record for part, _ in shared for i, record in part.items()}
