"""A command is a typed function: its parameters are the options, its docstring is their help."""

import argparse
import re
from argparse import ArgumentError, RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar, get_origin, get_type_hints

from jsonargparse import ArgumentParser, DefaultHelpFormatter
from typing_extensions import override

from lightning_mgpu.errors import UsageError
from lightning_mgpu.project import in_own_name

T = TypeVar("T")


class _Formatter(DefaultHelpFormatter, RawDescriptionHelpFormatter):
    """Help with the description as it is written, line by line."""


def run_command(
    function: Callable[..., T],
    args: Sequence[str],
    prog: str,
    description: str | None,
    **defaults: Any,
) -> T:
    """Call a function with the options of a command line; returns what it returns.

    A `Sequence` takes several words, `--devices 2 3`, and a `bool` may stand without one, `--csv`.
    `--help` shows the description and the parameters' lines in the function's docstring. `defaults`
    go before the function's.

    Raises:
        UsageError: One line for options that the function does not have or that have another type.
    """
    parser = ArgumentParser(
        prog=prog,
        description=in_own_name(description or ""),
        formatter_class=_Formatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    parser.add_function_arguments(function)
    parser.set_defaults(defaults)
    try:
        options = parser.parse_args(_join_values(function, args))
    except ArgumentError as error:
        message = re.sub(r'Parser key "(\w+)":', r"--\1:", " ".join(str(error).split()))
        raise UsageError(f"{prog.rpartition(' ')[2]}: {message}") from error
    return function(**vars(parser.instantiate(options)))


def _join_values(function: Callable, args: Sequence[str]) -> list[str]:
    """`--devices 2 3` -> `--devices=[2,3]` for a sequence, `--csv` -> `--csv=true` for a bool."""
    hints = get_type_hints(function).items()
    sequences = {f"--{name}" for name, hint in hints if get_origin(hint) is Sequence}
    flags = {f"--{name}" for name, hint in hints if hint is bool}
    joined: list[str] = []
    for arg in args:
        name, _, value = arg.partition("=")
        if name in sequences:
            joined.append(f"{name}=[{value.strip('[]')}]")
        elif joined and joined[-1].partition("=")[0] in sequences and not arg.startswith("-"):
            joined[-1] = f"{joined[-1][:-1]},{arg}]".replace("[,", "[")
        else:
            joined.append(f"{arg}=true" if arg in flags else arg)
    return joined


class ToolParser(argparse.ArgumentParser):
    """A parser for commands that hand on options they do not know; its errors are UsageErrors."""

    def __init__(self, prog: str, description: str | None) -> None:
        super().__init__(
            prog,
            description=in_own_name(description or ""),
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    @override
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog.rpartition(' ')[2]}: {message}")
