"""Hooks on the user's parameters run on the reduced gradient, once, not on one replica's part of it."""

import contextlib
from collections.abc import Iterable, Iterator

from torch import nn


@contextlib.contextmanager
def deferred_gradient_hooks(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Keep `register_hook` and `register_post_accumulate_grad_hook` hooks from running until the block ends."""
    hooked = [
        (parameter, parameter._backward_hooks, parameter._post_accumulate_grad_hooks)
        for parameter in parameters
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    ]
    for parameter, _, _ in hooked:
        parameter._backward_hooks = None
        parameter._post_accumulate_grad_hooks = None
    try:
        yield
    finally:
        for parameter, hooks, post_hooks in hooked:
            parameter._backward_hooks = hooks
            parameter._post_accumulate_grad_hooks = post_hooks
    for parameter, hooks, post_hooks in hooked:
        if parameter.grad is None:
            continue
        for hook in (hooks or {}).values():
            if (changed := hook(parameter.grad)) is not None:
                parameter.grad = changed
        for hook in (post_hooks or {}).values():
            hook(parameter)
