"""The exception for a mistake of the user's."""

import argparse
from typing import NoReturn

from typing_extensions import override


class UsageError(Exception):
    """A mistake of the user's. The message says what was given, what is allowed, and the fix."""


class ToolParser(argparse.ArgumentParser):
    """A parser whose errors are UsageErrors."""

    @override
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog.removeprefix('python -m lightning_mgpu ')}: {message}")
