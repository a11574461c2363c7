"""Tries an exchange on small tensors before it trains."""

from functools import partial
from io import BytesIO
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_mgpu.exchanges.runner import State, run_exchanges, same_bits

SHAPES = {str(shape): shape for shape in ((), (7,), (24, 30), (6, 4, 5, 5))}


def check_exchange(
    exchange: Any, num_replicas: int, device: Any = "cpu", dtype: torch.dtype = torch.float32
) -> bool:
    """Call an exchange as a strategy does; returns whether it keeps a state.

    Raises:
        ValueError: One line, if replicas return other bits than each other, or send at other times
            or in other shapes; if a tensor like X is not returned; if equal inputs and states give
            other bits when it is called again; if a state holds objects of classes.
    """
    try:
        first, again = (try_out(exchange, num_replicas, device, dtype) for _ in range(2))
        if not all(map(same_bits, first[0], again[0])) or first[1] != again[1]:
            raise RuntimeError("equal inputs and states give other bits in a second call")
        return any(torch.load(BytesIO(first[1]), weights_only=True))
    except Exception as error:
        what = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ValueError(f"exchange {path_of(exchange)} with {dtype}: {what}") from error


def path_of(exchange: Any) -> str:
    function = exchange.func if isinstance(exchange, partial) else exchange
    return f"{function.__module__}.{function.__qualname__}"


def try_out(exchange: Any, k: int, device: Any, dtype: torch.dtype) -> tuple[list[Tensor], bytes]:
    """What three calls return, each with the states of the one before, and the last states."""
    drawn = torch.Generator().manual_seed(0)
    states = [{name: State(name, replica, k) for name in SHAPES} for replica in range(k)]
    returned: list[Tensor] = []
    for _ in range(3):
        replicas, inputs = [], {}
        for each in states:
            inputs = {
                n: torch.randn(s, generator=drawn).to(device, dtype) for n, s in SHAPES.items()
            }
            replicas.append({n: exchange(X.clone(), each[n]) for n, X in inputs.items()})
        results, _ = run_exchanges(replicas, inputs, Tensor.detach, np.copy)
        returned += [X.clone() for X in results.values()]
    torch.save([plain(state) for each in states for state in each.values()], content := BytesIO())
    return returned, content.getvalue()


def plain(values: Any) -> Any:
    """A copy in plain types on the CPU, for a checkpoint."""
    values = dict(values) if isinstance(values, State) else values
    return apply_to_collection(values, Tensor, lambda X: X.detach().cpu().clone())
