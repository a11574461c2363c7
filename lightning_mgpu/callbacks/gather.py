"""What every process knows, brought together."""

from typing import Any

import torch.distributed


def gather_lists(own: list[Any]) -> list[Any]:
    """The lists of all processes as one, in order of rank; every process has to call it."""
    if not torch.distributed.is_initialized():
        return own
    gathered: list[list[Any]] = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(gathered, own)
    return [item for process in gathered for item in process]
