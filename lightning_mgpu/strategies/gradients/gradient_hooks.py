"""Hooks on the user's parameters run on the reduced gradient, once, not on one replica's part of it."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn


def has_gradient_hooks(parameter: nn.Parameter) -> bool:
    """Whether somebody called `register_hook` or `register_post_accumulate_grad_hook`."""
    return any(_hooks(parameter))


@contextlib.contextmanager
def deferred_gradient_hooks(parameters: Iterable[tuple[nn.Parameter, ...]]) -> Iterator[None]:
    """Keep hooks on gradients from running until the block ends, in which gradients are computed and reduced.

    As in autograd, a hook sees what this backward pass adds to the gradient, not what was accumulated before. Those a
    step has put on the replicas' copies do not run: the original's do, for all.

    Args:
        parameters: The copies of each, the original's first.
    """
    concerned = [copies for copies in parameters if any(map(has_gradient_hooks, copies))]
    of_copies = [(hooks, _take(hooks)) for _, *copies in concerned for copy in copies for hooks in _hooks(copy)]
    hooked = [
        (parameter, parameter.grad, [_take(hooks) for hooks in _hooks(parameter)])
        for parameter, *_ in concerned
        if has_gradient_hooks(parameter)
    ]
    for parameter, _, _ in hooked:
        parameter.grad = None
    try:
        yield
    finally:
        for hooks, own in of_copies:
            hooks.update(own)
        for parameter, _, taken in hooked:
            for hooks, own in zip(_hooks(parameter), taken):
                hooks.update(own)
    for parameter, accumulated, (hooks, post_hooks) in hooked:
        if parameter.grad is None:
            parameter.grad = accumulated
            continue
        with torch.set_grad_enabled(parameter.grad.requires_grad):  # by create_graph=True, as autograd has it
            for hook in hooks.values():
                if (changed := hook(parameter.grad)) is not None:
                    parameter.grad = changed
            if accumulated is not None:
                with torch.no_grad():
                    parameter.grad = accumulated.add_(parameter.grad)
            for hook in post_hooks.values():
                hook(parameter)


def _hooks(parameter: nn.Parameter) -> tuple[dict, dict]:
    both = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    return tuple({} if hooks is None else hooks for hooks in both)  # type: ignore[return-value]


def _take(hooks: dict) -> dict:
    """Empty the dict autograd looks into; it goes on with what it knows if it is given another one."""
    taken = dict(hooks)
    hooks.clear()
    return taken
