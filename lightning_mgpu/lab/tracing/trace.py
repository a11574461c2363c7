"""The messages of allreduces and exchanges, and their predicted time."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_mgpu.allreduce.plan import Message, Plan, Ref
from lightning_mgpu.allreduce.record import record

NUM_STEPS = 64  # per exchange


def trace(allreduce: Callable, k: int, numel: int) -> Plan:
    """The plan of an allreduce of k float32 tensors with `numel` elements each."""
    return record(allreduce, k, torch.empty(numel, device="meta"))


def predict(plan: Plan, latency: float, bandwidth: float) -> float:
    """Seconds, for a latency in seconds and a bandwidth in bytes per second and direction.

    The time of a superstep is the latency, plus an h-relation's: h is the largest number of
    bytes that a device sends or receives. Operations take no time. This is the bulk-synchronous
    parallel model (Valiant, 1990). LogGP (Alexandrov et al., 1995) adds a cost per message.
    """
    seconds = 0.0
    for number in range(plan.num_supersteps):
        steps = [plan.steps_of(device)[number] for device in range(plan.k)]
        h = max(max(sum(step.bytes_to), sum(step.bytes_from)) for step in steps)
        seconds += latency + h / bandwidth
    return seconds


def trace_exchange(exchange: Callable, k: int, numel: int) -> tuple[Plan, list[float]]:
    """Run a generator function 64 times on k small random matrices, the same in all steps.

    Returns the messages of the first step, as a plan without operations (a `yield` is a superstep,
    from each device to all), and the relative errors of the sums of results after each step.
    """

    def endless(step: Any) -> Any:
        results.append((yield from step))
        while True:
            yield ()

    names = {"name": "weight", "num_replicas": k, "seed": 0}
    states = [type("State", (dict,), names | {"replica": replica})() for replica in range(k)]
    side, generator = math.isqrt(min(numel, 2**16)), torch.Generator().manual_seed(0)
    Xs = torch.randn(k, side, side, generator=generator)
    messages: list[Any] = []
    errors, total = [], torch.zeros(side, side).double()
    for number in range(1, NUM_STEPS + 1):
        results: list[Tensor] = []
        steps = [endless(exchange(*pair)) for pair in zip(Xs.clone(), states)]
        sent, superstep = [step.send(None) for step in steps], 0
        while (sizes := [sum(t.nbytes for t in tree_leaves(ts)) for ts in sent])[0]:
            pairs = [(i, j) for i in range(k) for j in range(k) if i != j and number == 1]
            for i, j in pairs:
                like = torch.empty(sizes[i], dtype=torch.uint8, device="meta")
                messages.append(Message(i, j, superstep, like, 0, Ref(i), Ref(i), "yield"))
            sent, superstep = [step.send(sent) for step in steps], superstep + 1
        total += results[0]
        exact = number * Xs.sum(0).double()
        errors.append(float((total - exact).norm() / exact.norm()))
    return Plan(k, Xs[0].to("meta"), messages), errors
