"""From the replicas' losses to the one the Trainer calls `backward` on."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_mgpu.strategies.batch.gather import gather, weighted_mean


def find_loss(output: Any) -> Tensor | None:
    """The loss in what `training_step` returned."""
    return output.get("loss") if isinstance(output, Mapping) else output


def find_refused(outputs: Sequence[Any]) -> Any:
    """An output Lightning refuses: one without a loss that is not `None`; `None` if there is no such one."""
    given = [output for output in outputs if output is not None]
    return next((output for output in given if not isinstance(find_loss(output), Tensor)), None)


def combine_outputs(
    outputs: Sequence[Any],
    sizes: Sequence[int],
    replicas: Sequence[int],
    backward: Callable | None,
    device: torch.device,
) -> Any:
    """What one device would return for the whole batch; the backward pass of its loss reaches all replicas.

    Args:
        outputs: What `training_step` returned in every replica.
        sizes: Samples of their shards.
        replicas: Which ones they are.
        backward: Called with the replicas' losses, the gradients of these, and whether to keep the graphs. `None`
            leaves it to autograd.
        device: The original's.
    """
    ran = [n for n, output in enumerate(outputs) if find_loss(output) is not None]
    outputs, sizes = [outputs[n] for n in ran], [sizes[n] for n in ran]
    losses = {replicas[n]: find_loss(output) for n, output in zip(ran, outputs)}

    def of_replicas(gradients: Sequence[Tensor], keep_graph: bool) -> None:
        backward(losses, dict(zip(losses, gradients)), keep_graph)  # type: ignore[misc]

    loss = combine_losses(list(losses.values()), sizes, of_replicas if backward and len(ran) > 1 else None)  # type: ignore[arg-type]
    if not isinstance(outputs[0], Mapping):
        return loss
    rest = [{key: value for key, value in output.items() if key != "loss"} for output in outputs]
    return {"loss": loss, **gather(without_graph(rest), sizes, device)}


def without_graph(outputs: Any) -> Any:
    return apply_to_collection(outputs, Tensor, Tensor.detach)


def combine_losses(
    losses: Sequence[Tensor], sizes: Sequence[int], backward: Callable[[Sequence[Tensor], bool], None] | None
) -> Tensor:
    """The mean of the shards' losses, weighted by the shard sizes: the loss of the whole batch.

    Its backward pass reaches every replica. Left to autograd, one thread runs it for all CPU replicas; `backward` is
    how to run it otherwise.

    Args:
        losses: One scalar a replica, each the mean over its shard.
        sizes: Samples of the shards.
        backward: Called with the gradients of the losses, and whether to keep the graphs. `None` leaves it to autograd.
    """
    if backward is None:
        return weighted_mean([loss.to(losses[0].device) for loss in losses], sizes)
    value = weighted_mean([loss.detach().to(losses[0].device) for loss in losses], sizes)
    if not any(loss.requires_grad for loss in losses):
        return value
    weights = [size / sum(sizes) for size in sizes]
    return _Junction.apply(torch.zeros_like(value, requires_grad=True), value, weights, backward)  # type: ignore[no-any-return]


class _Junction(torch.autograd.Function):
    """Hands the gradient of the combined loss to `backward`, times the weight of each loss."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, weights: Sequence[float], backward: Callable) -> Tensor:
        ctx.weights, ctx.run = weights, backward
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        keep_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        ctx.run([gradient * weight for weight in ctx.weights], keep_graph)
        return torch.zeros_like(gradient), None, None, None


def watch_backward(loss: Tensor, begin: Callable[[], Any], end: Callable[[], Any]) -> Tensor:
    """The loss; `begin` is called when a backward pass of it begins, `end` when all gradients are where they belong."""
    return _Watch.apply(loss, begin, end)  # type: ignore[no-any-return]


class _Watch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, begin: Callable[[], Any], end: Callable[[], Any]) -> Tensor:
        ctx.begin, ctx.end = begin, end
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ctx.begin()
        torch.autograd.Variable._execution_engine.queue_callback(ctx.end)  # type: ignore[attr-defined]
        return gradient, None, None


class InputsOfAll(TorchFunctionMode):
    """Lets `loss.backward(inputs=...)` reach the copies, too, of the original's parameters that are named.

    Args:
        parameters: The copies of each, the original's first.
    """

    def __init__(self, parameters: Sequence[tuple[Tensor, ...]]) -> None:
        super().__init__()
        self.copies = {id(copies[0]): copies for copies in parameters}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.backward and (inputs := kwargs.get("inputs")) is not None:
            named = [inputs] if isinstance(inputs, Tensor) else inputs
            kwargs["inputs"] = [copy for part in named for copy in self.copies.get(id(part), (part,))]
        return function(*args, **kwargs)


_FORK = threading.RLock()


@contextlib.contextmanager
def one_fork_at_a_time() -> Iterator[None]:
    """Let only one replica be inside `torch.random.fork_rng` in the block.

    There activation checkpointing replays the random numbers of a forward pass, on a generator replicas share.
    """
    fork_rng = torch.random.fork_rng

    @contextlib.contextmanager
    def locked(*args: Any, **kwargs: Any) -> Iterator[None]:
        with _FORK, fork_rng(*args, **kwargs):
            yield

    torch.random.fork_rng = locked
    try:
        yield
    finally:
        torch.random.fork_rng = fork_rng
