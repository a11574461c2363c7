"""Secrets stay out of files and uploads: `***` stands for them.

Secrets are the user and password in a URL, and the text of an option whose name ends in `password`, `passwd`, `secret`,
`token`, `api_key` or `credentials`. Others are not recognised.
"""

import re
from collections.abc import Sequence
from typing import Any

HIDDEN = "***"
IN_URL = re.compile(r"(?<=://)[^\s/@'\"]+(?=@)")  # https://user:password@host
# `pad_token` and its like are words of a language model
NAME = re.compile(r"(?i)(?!(?:pad|eos|bos|unk|mask|sep|cls)_).*(?:api_?key|token|secret|password|passwd|credentials?)")


def redact(text: str) -> str:
    """The text without the user and password of its URLs."""
    return IN_URL.sub(HIDDEN, text)


def redact_values(config: Any) -> Any:
    """Plain values, as read from YAML or JSON, without the secrets among their texts."""
    if isinstance(config, dict):
        return {name: HIDDEN if is_secret(name, value) else redact_values(value) for name, value in config.items()}
    if isinstance(config, list):
        return [redact_values(value) for value in config]
    return redact(config) if isinstance(config, str) else config


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line without its secrets, those of `--logger.api_key=KEY` and `--logger.api_key KEY` included."""
    found: list[str] = []
    for before, argument in zip(["", *arguments], arguments):
        name, _, value = argument.partition("=") if argument.startswith("--") else (before, "", argument)
        hides = name.startswith("--") and is_secret(name.rpartition(".")[2], value)
        found.append(f"{argument.removesuffix(value)}{HIDDEN}" if hides else redact(argument))
    return found


def is_secret(name: Any, value: Any) -> bool:
    """Whether the value of an option of this name, which has no dots, is a secret."""
    return isinstance(value, str) and value != "" and NAME.fullmatch(str(name)) is not None
