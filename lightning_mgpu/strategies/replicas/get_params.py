"""`get_params` of the book: a whole LightningModule copied to a device, with what users have put on it."""

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset

Module = TypeVar("Module", bound=nn.Module)
SHARED = (Dataset, DataLoader, LightningDataModule, partial)


def get_params(module: LightningModule, device: torch.device) -> LightningModule:
    """Copy a module's parameters, buffers and structure to a device (d2l.ai, 'Training on Multiple GPUs').

    Tied parameters stay tied; storage is never shared, also on the same device. The trainer and data
    are shared with the original.
    """
    trainer = module._trainer
    shared = [trainer, getattr(trainer, "profiler", None)]
    shared += [v for m in module.modules() for v in vars(m).values() if isinstance(v, SHARED)]
    memo = {id(value): value for value in shared if value is not None}
    with torch.no_grad():  # copies of scripted layers would have a graph that leads to the originals
        replica = copy_with_care(module, memo)
    for copied in replica.modules():
        vars(copied).pop("_compiled_call_impl", None)  # calls the original
        if isinstance(copied, LightningModule):
            copied._trainer = trainer  # a deepcopy drops it
            if type(copied).print is LightningModule.print:
                vars(copied)["print"] = _print_nothing  # the original does, for all
    for original, parameter in zip(module.parameters(), replica.parameters()):
        parameter.grad = None
        vars(parameter).update(vars(original))  # a deepcopy drops these, too
    return replica.to(device)


def copy_with_care(module: Module, memo: dict[int, Any]) -> Module:
    """Copy a module that may have something in it that `copy.deepcopy` refuses.

    Then layers whose class cannot be made without arguments are made without asking it; buffers lose their graph;
    everything else, a lock, a generator, an open file, is shared with the original.
    """
    try:
        return copy.deepcopy(module, dict(memo))
    except Exception:
        memo = dict(memo)
    buffers = [buffer for buffer in module.buffers() if not buffer.is_leaf]
    memo.update({id(buffer): buffer.detach().clone() for buffer in buffers})
    shells = [(m, nn.Module.__new__(type(m))) for m in module.modules() if type(m).__new__ is not nn.Module.__new__]
    memo.update({id(value): value for value in _uncopyable(module, memo | {id(m): shell for m, shell in shells})})
    memo.update({id(layer): shell for layer, shell in shells})
    for layer, shell in shells:
        vars(shell).update(copy.deepcopy(vars(layer), memo))
    return copy.deepcopy(module, memo)


def _uncopyable(module: nn.Module, memo: dict[int, Any]) -> Iterator[Any]:
    """Attributes of a module or its children that `copy.deepcopy` refuses."""
    for name, value in ((name, value) for m in module.modules() for name, value in vars(m).items()):
        if name not in ("_parameters", "_buffers", "_modules"):
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:
                yield value


def _print_nothing(*args: Any, **kwargs: Any) -> None:
    return
