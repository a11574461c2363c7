"""Manual optimization: the user's `training_step` runs on every replica, and they meet in `backward` and `step`.

The replicas run the same code on their shards. In `manual_backward` each computes its gradients, then all wait while
the sum is given to everyone. In `optimizer.step` all wait while the original's optimizer steps, which makes every
replica update itself (`update_replicas`).
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_mgpu.strategies.batch.gather import gather, part_of, weighted_mean
from lightning_mgpu.strategies.gradients.gradient_hooks import deferred_gradient_hooks
from lightning_mgpu.strategies.gradients.losses import without_graph
from lightning_mgpu.strategies.threads.team import Team


class Lockstep:
    """One training step of manual optimization over a team.

    Args:
        team: Runs the replicas.
        sizes: Each replica's samples in the step.
        joint: Whether one backward pass runs over the losses of all replicas, else each runs its own.
    """

    def __init__(self, team: Team, sizes: dict[int, int], joint: bool) -> None:
        self.team, self.sizes, self.joint = team, sizes, joint
        self.weights = {i: size / sum(sizes.values()) for i, size in sizes.items()}
        self.num_backwards = 0

    def backward(
        self, strategy: Any, module: LightningModule, loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Tensor:
        """`manual_backward` of one replica: the gradients of all are reduced when it returns."""
        is_first = self.team.index == 0
        loss = loss * self.weights[self.team.index]
        original, plugin = strategy.original, strategy.precision_plugin
        self._meet("manual_backward")  # now nobody looks at gradients
        losses, inputs = zip(*self.team.exchange((loss, kwargs.get("inputs"))))
        with contextlib.ExitStack() as stack:
            if is_first:
                self.num_backwards += 1
                strategy.gradients.begin()
                total = sum(part.to(loss.device) for part in losses)  # the whole batch's, for the hooks
                strategy.pre_backward(total)
                total = plugin.pre_backward(total, original)  # scales it and calls the hooks
                stack.enter_context(deferred_gradient_hooks(strategy.gradients.parameters))
            self.team.exchange()
            if not self.joint:
                if (scaler := getattr(plugin, "scaler", None)) is not None:
                    loss = scaler.scale(loss)
                if loss.requires_grad or not any(part.requires_grad for part in losses):  # else the shard has no part
                    plugin.backward(loss, module, optimizer, *args, **kwargs)
            elif is_first:
                if kwargs.get("inputs") is not None:  # each replica means its own
                    kwargs["inputs"] = [part for own in inputs for part in ([own] if isinstance(own, Tensor) else own)]
                with self.team.for_all():
                    strategy.run_backward(total, optimizer, *args, **kwargs)
            self.team.exchange()
            if is_first and not strategy.gradients.are_reduced:
                strategy.exchange_gradients()
        if is_first:
            strategy.gradients.mark()
            total = plugin.post_backward(total, original)
            strategy.post_backward(total)
            strategy.gradients.give(everything=strategy.hooks.own_backward)
        self.team.exchange()
        return loss.detach()

    def step(self, n: int, run: Callable[[Callable[[], Any]], Any], closure: Callable, before: Callable) -> Any:
        """`optimizer.step` of one replica.

        Args:
            n: Which of the module's optimizers.
            run: Steps the original's optimizer with a closure; called in the first replica only.
            closure: The user's, of this replica; all replicas call theirs when the optimizer asks for it.
            before: Called before every closure, when no replica runs.
        """
        self._meet(f"step of optimizer {n}")
        own: list[Any] = []  # what each call of the closure returned in this replica; None for a loss, a graph less

        def call_closure() -> list[Any]:
            output = closure()
            outputs = self.team.exchange(output)
            own.append(None if _are_losses(outputs) else output)
            return outputs

        if self.team.index != 0:
            while (order := self.team.exchange()[0])[0] == "closure":
                call_closure()
            _, result, call = order
            result = move_data_to_device(result, self.team.devices[self.team.index])
            return result if call is None else part_of(result, own[call])
        whole: list[Any] = []  # what each call returned in all of them, put together

        def all_closures() -> Any:
            before()
            self.team.exchange(("closure", None))
            # line searches look at the loss of the whole batch
            outputs = move_data_to_device(call_closure(), self.team.devices[0])
            if _are_losses(outputs):
                whole.append(None)
                return weighted_mean(outputs, list(self.weights.values()))
            whole.append(gather(outputs, list(self.sizes.values()), self.team.devices[0]))
            return whole[-1]

        result = run(all_closures)
        call = next((n for n, found in enumerate(whole) if found is not None and found is result), None)
        if len(self.sizes) > 1:
            result = without_graph(result)  # it belongs to no replica
        self.team.exchange(("done", result, call))
        return result if call is None else part_of(result, own[call])

    def schedule(self, name: str, step: Callable, follow: Callable[[], Any], *args: Any, **kwargs: Any) -> None:
        """`step` of a learning-rate scheduler in one replica: made once, with the whole batch's loss if it wants one.

        Args:
            name: The scheduler's, for errors.
            step: The scheduler's own.
            follow: Gives the replicas' optimizers the new rates.
        """
        self._meet(f"step of {name}")
        given = self.team.exchange((args, kwargs))
        if self.team.index == 0:
            weights = list(self.weights.values())

            def whole(parts: Sequence[Any]) -> Any:
                is_loss = all(isinstance(part, (float, Tensor)) for part in parts)
                return weighted_mean(move_data_to_device(parts, self.team.devices[0]), weights) if is_loss else parts[0]

            arguments, keywords = zip(*given)
            step(*map(whole, zip(*arguments)), **{key: whole([own[key] for own in keywords]) for key in kwargs})
            follow()
        self.team.exchange()

    def after_step(self, count: Callable[[], Any]) -> Callable[[], None]:
        """What `LightningOptimizer` calls after a step: replicas go on when the Trainer has counted it."""

        def meet() -> None:
            count()
            if self.team.is_running:
                self.team.exchange()

        return meet

    def _meet(self, place: str) -> None:
        places = self.team.exchange(place)
        if any(other != place for other in places):
            raise RuntimeError(
                f"the replicas are at {', '.join(map(str, places))}: every replica must call manual_backward and "
                "optimizer.step in the same order, whatever is in its shard."
            )


def _are_losses(outputs: Sequence[Any]) -> bool:
    """Whether the closures have returned a number each, also in a tensor of one element: neither counts nor samples."""
    return all(
        output.numel() == 1 and (output.is_floating_point() or output.is_complex())
        if isinstance(output, Tensor)
        else isinstance(output, (float, np.inexact))
        for output in outputs
    )
