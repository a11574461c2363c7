"""Secrets stay out of files, logs and what is uploaded: passwords in URLs, tokens of the environment and of netrc."""

import contextlib
import netrc
import os
import re

HIDDEN = "***"
IN_URL = re.compile(r"(?<=://)[^\s/@'\"]+(?=@)")  # https://user:password@host
IN_QUERY = re.compile(
    r"(?i)([?&;](?:[\w-]*(?:token|secret|password|passwd|signature|credential)|(?:\w+[_-])?key|sig|auth)=)[^\s&;'\"#]+"
)
SECRET_NAME = re.compile(r"(?i)(^|_)(api_?key|key|token|secret|password|passwd|passphrase|credentials?)$")
SHORTEST = 8  # characters; a shorter value of the environment is as likely a word of its own


def redact(text: str) -> str:
    """The text with every secret this process knows of replaced by `***`.

    Secrets are the user and password of a URL, its query parameters named like a token, the values of environment
    variables named like one (`WANDB_API_KEY`, `HF_TOKEN`), and the passwords of the netrc file.
    """
    for secret in sorted(_known(), key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    return IN_QUERY.sub(rf"\1{HIDDEN}", IN_URL.sub(HIDDEN, text))


def _known() -> set[str]:
    values = {value for name, value in os.environ.items() if SECRET_NAME.search(name)}
    with contextlib.suppress(OSError, netrc.NetrcParseError):  # no netrc, nothing to hide
        values.update(entry[2] or "" for entry in netrc.netrc(os.environ.get("NETRC")).hosts.values())
    return {value for value in values if len(value) >= SHORTEST and not os.path.exists(value)}
