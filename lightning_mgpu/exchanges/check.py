"""Runs an exchange on small tensors before training starts."""

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
    """Call an exchange like a strategy does, with 2, 3 and 4 replicas; return whether it has state.

    `name` appears in error messages instead of the function's path.

    Raises:
        ValueError: If results are not bitwise identical in all replicas, or in a second call with
            equal inputs and states; if replicas send different shapes, or at different times; if
            a result does not have the shape, dtype and device of X; if a state contains objects.
    """
    like = {str(shape): torch.zeros(shape, device=device, dtype=dtype) for shape in shapes}
    has_state = False
    for k in (2, 3, 4):
        try:
            first, again = (call_three_times(function, k, like) for _ in range(2))
            if first != again:
                raise RuntimeError("equal inputs and states give different results")
            if classes := get_unsafe_globals_in_checkpoint(BytesIO(first)):
                raise TypeError(f"a state contains {classes}: use tensors, numbers, strings")
            _, datas = torch.load(BytesIO(first), weights_only=True)
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            title = f"exchange {name or path_of(function)} with {dtype}"
            raise ValueError(f"{title}: {reason}") from error
        has_state |= any(data for by_name in datas for data in by_name.values())
    return has_state


def call_three_times(exchange: Any, k: int, like: dict[str, Tensor]) -> bytes:
    """Serialize the results of three calls, which share states, and the final states."""
    generator = torch.Generator().manual_seed(0)
    datas: list[dict[str, Any]] = [{name: {} for name in like} for _ in range(k)]
    returned, plan = list[Tensor](), RoundLayout()
    for call in range(3):
        replicas = [
            {name: torch.randn(p.shape, generator=generator).to(p) for name, p in like.items()}
            for _ in range(k)
        ]
        if call == 2:  # like a shard without a gradient
            replicas[0] = {name: torch.zeros_like(p) for name, p in like.items()}
        datas = deepcopy(datas)  # as the strategy does
        states = [
            {name: State(name, replica, k, data) for name, data in by_name.items()}
            for replica, by_name in enumerate(datas)
        ]
        returned += run_here(run_exchanges(exchange, replicas, states, 1, plan))[0]
        if not all(X.isfinite().all() for X in returned):
            raise RuntimeError("a gradient of zeros gives non-finite results")
    torch.save(move_data_to_device([returned, datas], "cpu"), content := BytesIO())
    return content.getvalue()


def path_of(exchange: Any) -> str:
    function = getattr(exchange, "func", exchange)  # of a partial
    return f"{function.__module__}.{function.__qualname__}"
