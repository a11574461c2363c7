"""Algorithms that see all gradients of a model at once, which saves calls for each parameter."""

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from lightning_mgpu.allreduce.check import Allreduce, AllreduceMany

AnyAllreduce = TypeVar("AnyAllreduce", bound=Allreduce)


def with_many(many: AllreduceMany) -> Callable[[AnyAllreduce], AnyAllreduce]:
    """Decorate an allreduce: `allreduce.many(gradients)`, for all gradients at once, is `many`.

    Both must give the same sums; `check_allreduce` tries both.
    """

    def attach(allreduce: AnyAllreduce) -> AnyAllreduce:
        allreduce.many = many  # type: ignore[attr-defined]
        return allreduce

    return attach


def allreduce_many(allreduce: Allreduce, gradients: list[list[Tensor]]) -> None:
    """Reduce each parameter's k gradients in place: by `allreduce.many` if any, else one by one."""
    many: AllreduceMany | None = getattr(allreduce, "many", None)
    if many is not None:
        many(gradients)
    else:
        for tensors in gradients:
            allreduce(tensors)
