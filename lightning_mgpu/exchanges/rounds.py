"""The rounds of an exchange, between processes."""

from collections.abc import Callable, Container
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_mgpu.exchanges.runner import Layout, Outcome, drive, run_exchanges
from lightning_mgpu.processes.meeting import start_sending
from lightning_mgpu.strategies import ManualAllreduceStrategy
from lightning_mgpu.strategies.window import Gradients

MISSING, FINITE, NOT_FINITE = 0, 1, 2  # what a replica has of a parameter


class RoundsStrategy(ManualAllreduceStrategy):
    """Carries the rows of exchanges, and the replicas' buffers, which travel in the first round."""

    _function: Any  # the exchange, with its options

    def reset_rounds(self) -> None:
        self._states: dict[int, Any] = {replica: {} for replica in self.local_replicas}
        self._plan: list[Layout] = []
        self.num_bytes = np.zeros(2)  # sent by one replica: by this exchange, by the exact sum

    def exchange_all(
        self, given: Container[Tensor], replicas: list[Gradients], purpose: str, **facts: int
    ) -> Gradients:
        """Run the exchanges of the given parameters, and meet, to compare facts and what there is.

        Returns the results for parameters of which any replica has an X. If one of them is not
        finite, the result is NaN in all replicas, and no state keeps it.
        """
        named = dict(self.module.named_parameters())
        parameters = {name: p for name, p in named.items() if p in given and p.numel()}
        looks = [max(look_at(each.get(p)) for each in replicas) for p in named.values()]
        end = self._start_rounds(parameters, replicas)
        all_looks = self.compare_facts(purpose, looks, (), **facts)
        look_of = dict(zip(named, all_looks.max(axis=0, initial=0).tolist()))
        outcome = end()
        if outcome.buffers is not None:
            super().share_buffers(outcome.buffers)
        self.num_bytes[0] += outcome.num_bytes
        for replica, kept in self._states.items():
            after = outcome.states[replica].items()
            kept |= {key: data for key, data in after if look_of[key[0]] == FINITE}
        for name, result in outcome.results.items():
            if look_of[name] == NOT_FINITE:
                result.fill_(torch.nan)
        results = outcome.results.items()
        return {parameters[name]: X for name, X in results if look_of[name] != MISSING}

    def _start_rounds(
        self, parameters: dict[str, Tensor], replicas: list[Gradients]
    ) -> Callable[[], Outcome]:
        """Returns a function that ends them. The first row of a known plan is on its way."""
        states, k, plan = self._states, self.num_replicas, self._plan
        run = run_exchanges(self._function, parameters, replicas, states, k, plan, self._buffers)
        # between GPUs, a process that fails meanwhile would leave the others in a kernel
        is_slow = not self.is_alone and self.cells is None and self.root_device.type == "cpu"
        if not (plan and is_slow) or self.module.trainer.interrupted:
            return partial(drive, run, self.gather_rows)
        row, _ = next(run)
        # by another group than a meeting's: a process may be at another place
        receive = start_sending(self, row.flatten().numpy(), None)
        return lambda: drive(run, self.gather_rows, torch.from_numpy(receive()).view(k, -1))


def look_at(X: Tensor | None) -> int:
    return MISSING if X is None else FINITE if X.isfinite().all() else NOT_FINITE
