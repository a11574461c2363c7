"""Secrets stay out of files, logs and uploads: `***` stands for them.

Secrets are the user and password of a URL, its parameters named like a token, the values of environment variables named
like a secret (`WANDB_API_KEY`, `HF_TOKEN`), the passwords of the netrc file, and texts under names of secrets
(`api_key`, `--trainer.logger.password`).
"""

import contextlib
import netrc
import os
import re
from collections.abc import Sequence
from typing import Any

HIDDEN = "***"
IN_URL = re.compile(r"(?<=://)[^\s/@'\"]+(?=@)")  # https://user:password@host
IN_QUERY = re.compile(r"(?i)([?&](?:[\w-]*(?:token|secret|password|signature)|(?:\w+[_-])?key|sig|auth)=)[^\s&'\"#]+")
SECRET_NAME = re.compile(r"(?i)(?:.*[._-])?(?:api_?key|token|secret|password|passwd|credentials?)")
LONG = 16  # characters of an access token
SHORTEST = 8  # characters; a shorter value of the environment is as likely a word of its own


def redact(text: str) -> str:
    """The text without the secrets that this process knows of."""
    for secret in sorted(_known(), key=len, reverse=True):
        text = re.sub(rf"(?<![\w.]){re.escape(secret)}(?![\w.])", HIDDEN, text)
    return IN_QUERY.sub(rf"\1{HIDDEN}", IN_URL.sub(HIDDEN, text))


def redact_values(config: Any) -> Any:
    """Plain values, as read from YAML or JSON, without the secrets among their texts."""
    if isinstance(config, dict):
        return {name: HIDDEN if _hides(name, value) else redact_values(value) for name, value in config.items()}
    if isinstance(config, list):
        return [redact_values(value) for value in config]
    return redact(config) if isinstance(config, str) else config


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line without its secrets, those of `--logger.api_key=KEY` and `--logger.api_key KEY` included."""
    found: list[str] = []
    for before, argument in zip(["", *arguments], arguments):
        name, _, value = argument.partition("=") if argument.startswith("--") else (before, "", argument)
        hides = name.startswith("--") and _hides(name, value)
        found.append(f"{argument.removesuffix(value)}{HIDDEN}" if hides else redact(argument))
    return found


def _hides(name: Any, value: Any) -> bool:
    if not isinstance(value, str) or not value or not SECRET_NAME.fullmatch(str(name)):
        return False
    return "token" not in str(name).lower() or len(value) >= LONG  # `pad_token: <|end|>` is none


def _known() -> set[str]:
    values = {value for name, value in os.environ.items() if SECRET_NAME.fullmatch(name)}
    with contextlib.suppress(OSError, netrc.NetrcParseError):  # no netrc, nothing to hide
        values |= {entry[2] or "" for entry in netrc.netrc(os.environ.get("NETRC")).hosts.values()}
    return {value for value in values if len(value) >= SHORTEST}
