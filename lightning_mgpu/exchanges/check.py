"""Tries an exchange on small tensors before it trains."""

from copy import deepcopy
from io import BytesIO
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from lightning_mgpu.exchanges.route import RoundLayout, State, run_exchanges, run_here

SHAPES: Any = ((), (7,), (24, 30), (6, 4, 5, 5), (5003,))


def check_exchange(
    function: Any,
    name: str = "",
    device: Any = "cpu",
    dtype: torch.dtype = torch.float32,
    shapes: Any = SHAPES,
) -> bool:
    """Call an exchange as a strategy does, with 2, 3 and 4 replicas; returns if it keeps a state.

    `name` is what a message names, if `function` is something around it.

    Raises:
        ValueError: One line, if replicas return other bits than each other, or send at other times
            or in other shapes; if a tensor like X is not returned; if equal inputs and states give
            other bits when it is called again; if a state holds objects of classes.
    """
    like = {str(shape): torch.zeros(shape, device=device, dtype=dtype) for shape in shapes}
    has_state = False
    for k in (2, 3, 4):
        try:
            first, again = (call_three_times(function, k, like) for _ in range(2))
            if first != again:
                raise RuntimeError("equal inputs and states give other bits in a second call")
            if classes := get_unsafe_globals_in_checkpoint(BytesIO(first)):
                raise TypeError(f"a state holds objects of {classes}: keep tensors, numbers, text")
            _, datas = torch.load(BytesIO(first), weights_only=True)
        except Exception as error:
            what = f"{type(error).__name__}: {' '.join(str(error).split())}"
            where = f"exchange {name or path_of(function)} with {dtype}"
            raise ValueError(f"{where}: {what}") from error
        has_state |= any(data for each in datas for data in each.values())
    return has_state


def call_three_times(exchange: Any, k: int, like: dict[str, Tensor]) -> bytes:
    """The results of three calls, each with the states of the call before, and the last states."""
    generator = torch.Generator().manual_seed(0)
    datas: list[dict[str, Any]] = [{name: {} for name in like} for _ in range(k)]
    returned, plan = list[Tensor](), RoundLayout()
    for call in range(3):
        replicas = [
            {name: torch.randn(p.shape, generator=generator).to(p) for name, p in like.items()}
            for _ in range(k)
        ]
        if call == 2:  # as of a shard that has no gradient
            replicas[0] = {name: torch.zeros_like(p) for name, p in like.items()}
        datas = deepcopy(datas)  # as the strategy does
        states = [
            {name: State(name, replica, k, data) for name, data in each.items()}
            for replica, each in enumerate(datas)
        ]
        returned += run_here(run_exchanges(exchange, replicas, states, 1, plan))[0]
        if not all(X.isfinite().all() for X in returned):
            raise RuntimeError("gradients of zeros give a result that is not finite")
    torch.save(move_data_to_device([returned, datas], "cpu"), content := BytesIO())
    return content.getvalue()


def path_of(exchange: Any) -> str:
    function = getattr(exchange, "func", exchange)  # of a partial
    return f"{function.__module__}.{function.__qualname__}"
