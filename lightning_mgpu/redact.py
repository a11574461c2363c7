"""Secrets stay out of files, logs and what is uploaded: passwords in URLs, tokens of the environment and of netrc.

Values of options named like a secret are hidden, too: `api_key`, `--trainer.logger.password`.
"""

import contextlib
import netrc
import os
import re
from collections.abc import Sequence
from typing import Any

HIDDEN = "***"
IN_URL = re.compile(r"(?<=://)[^\s/@'\"]+(?=@)")  # https://user:password@host
IN_QUERY = re.compile(
    r"(?i)([?&;](?:[\w-]*(?:token|secret|password|passwd|signature|credential)|(?:\w+[_-])?key|sig|auth)=)[^\s&;'\"#]+"
)
IN_YAML = re.compile(  # api_key: abc on a line of its own; {"api_key": "abc"} and {api_key: abc}
    r"(?m)(?P<before>(?:^[ -]*|(?P<flow>[{,]) *)[\"']?(?P<name>[\w-]+)[\"']?: *)"
    r"(?P<value>'(?:[^']|'')*'|\"(?:[^\"\\]|\\.)*\"|(?(flow)[^\s,{}\[][^,}\n]*|[^\s{\[|>&].*))"
)
NO_STRING = re.compile(r"(?i)null|true|false|[-+]?[\d.]+(e[-+]?\d+)?")  # in YAML, where it is not quoted
SECRET_NAME = re.compile(r"(?i)(?:.*[._-])?(?:api_?key|key|token|secret|password|passwd|passphrase|credentials?)")
PERHAPS_SECRET = re.compile(r"(?i).*(?<!api)(?<!api_)(?:key|token)")  # `key: image` and `pad_token: <|end|>` are none
LIKE_A_SECRET = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w+/=.-]{16,}")
SHORTEST = 8  # characters; a shorter value of the environment is as likely a word of its own


def redact(text: str) -> str:
    """The text with every secret this process knows of replaced by `***`; YAML stays YAML.

    Secrets are the user and password of a URL, its query parameters named like a token, the values of environment
    variables named like one (`WANDB_API_KEY`, `HF_TOKEN`), of such keys in YAML, and the passwords of the netrc file.
    """
    for secret in sorted(_known(), key=len, reverse=True):
        text = re.sub(_whole(secret), HIDDEN, text)
    text = IN_QUERY.sub(rf"\1{HIDDEN}", IN_URL.sub(HIDDEN, text))
    text = IN_YAML.sub(_hide, text)
    return re.sub(r"(?m)^([ -]*[\w-]+: |[ -]*- )\*\*\*$", rf"\1'{HIDDEN}'", text)  # a bare * begins an alias


def redact_values(config: Any) -> Any:
    """Plain values, as read from YAML or JSON, without the secrets in their strings and under names of secrets."""
    if isinstance(config, dict):
        hidden = {name for name, value in config.items() if isinstance(value, str) and is_secret(str(name), value)}
        return {name: HIDDEN if name in hidden else redact_values(value) for name, value in config.items()}
    if isinstance(config, list):
        return [redact_values(value) for value in config]
    return redact(config) if isinstance(config, str) else config


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line without its secrets, those of `--logger.api_key=KEY` and `--logger.api_key KEY` included."""
    found: list[str] = []
    for before, argument in zip(["", *arguments], arguments):
        name, _, value = argument.partition("=") if argument.startswith("--") else (before, "", argument)
        is_hidden = name.startswith("--") and is_secret(name, value)
        found.append(f"{argument.removesuffix(value)}{HIDDEN}" if is_hidden else redact(argument))
    return found


def is_secret(name: str, value: str) -> bool:
    """Whether a value is one by its name: that of an option, a variable, or a key in a file."""
    if not SECRET_NAME.fullmatch(name) or not value:
        return False
    return not PERHAPS_SECRET.fullmatch(name) or LIKE_A_SECRET.fullmatch(value) is not None


def _hide(match: re.Match[str]) -> str:
    before, name, value = match["before"], match["name"], match["value"]
    quote = value[0] if value[0] in "'\"" else ""
    if not is_secret(name, value.strip("'\"")) or (not quote and NO_STRING.fullmatch(value.strip())):
        return match[0]
    quote = quote or "'"
    return f"{before}{quote}{HIDDEN}{quote}"


def _known() -> set[str]:
    values = {value for name, value in os.environ.items() if SECRET_NAME.fullmatch(name)}
    with contextlib.suppress(OSError, netrc.NetrcParseError):  # no netrc, nothing to hide
        values.update(entry[2] or "" for entry in netrc.netrc(os.environ.get("NETRC")).hosts.values())
    return {value for value in values if len(value) >= SHORTEST and not os.path.exists(value)}


def _whole(secret: str) -> str:
    """A pattern for it, as YAML quotes it too; a mere word (`lightning`) is none inside a name (`lightning_mgpu.x`)."""
    if re.fullmatch("[a-z]+", secret):
        return rf"(?<![\w.]){secret}(?!\w|\.\w)"
    return "|".join(re.escape(form) for form in sorted({secret.replace("'", "''"), secret}, key=len, reverse=True))
