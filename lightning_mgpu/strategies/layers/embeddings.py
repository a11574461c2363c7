"""`nn.Embedding(max_norm=...)` changes its weights in `forward`: it shortens the rows it looks up.

Every replica shortens what any of them looks up, so that rows are those of one device, and stay equal.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_mgpu.strategies.layers.own_forward import OwnForward
from lightning_mgpu.strategies.threads.team import Team

KINDS = (nn.Embedding, nn.EmbeddingBag)


def synchronize_embedding(layers: Sequence[nn.Embedding | nn.EmbeddingBag], team: Team) -> None:
    """Let the replicas' copies of one layer, which has a `max_norm`, shorten the same rows."""
    for layer in layers:
        vars(layer)["forward"] = _Synchronized(layer, team)


class _Synchronized(OwnForward):
    layer: nn.Embedding | nn.EmbeddingBag

    def __call__(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layer = self.layer
        is_repeated = torch._C._current_graph_task_id() != -1  # activation checkpointing: they are short by now
        if self.team.is_running and not is_repeated:
            rows = torch.cat([part.to(input.device).flatten() for part in self.team.exchange(input)])
            assert layer.max_norm is not None
            with torch.no_grad():
                torch.embedding_renorm_(layer.weight, rows.contiguous(), layer.max_norm, layer.norm_type)
        return self.forward(input, *args, **kwargs)
