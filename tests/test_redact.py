"""No secret in any form passes; nothing else is touched."""

from pathlib import Path

import pytest

from lightning_mgpu.errors import in_one_line
from lightning_mgpu.redact import redact


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password out-of-netrc\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("SOME_API_KEY", "from-the-environment")
    monkeypatch.setenv("OTHER_TOKEN", "short")
    monkeypatch.setenv("SSH_KEY", str(tmp_path / "netrc"))  # names a file: where it is, is no secret


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://me:hunter2@host:8080/x", "https://***@host:8080/x"),
        ("--url=https://token@host", "--url=https://***@host"),
        ("https://host/x?a=1&access_token=abc&b=2", "https://host/x?a=1&access_token=***&b=2"),
        ("https://host/x?X-Amz-Signature=abc#top", "https://host/x?X-Amz-Signature=***#top"),
        ("https://host/x?key=abc", "https://host/x?key=***"),
        ("has from-the-environment in it", "has *** in it"),
        ("has out-of-netrc in it", "has *** in it"),
    ],
)
def test_secrets_are_hidden(text: str, shown: str) -> None:
    assert redact(text) == shown


@pytest.mark.parametrize(
    "text", ["a short story", "https://host/x?page=2&monkey=3", "mail me@host", "model.key: 3", "lr: 0.1\ntokens: 5\n"]
)
def test_nothing_else_is_touched(text: str, tmp_path: Path) -> None:
    assert redact(text) == text
    assert redact(str(tmp_path / "netrc")) == str(tmp_path / "netrc")


def test_error_lines_hide_secrets() -> None:
    assert in_one_line(ValueError("cannot open\nhttps://me:hunter2@host")) == "cannot open https://***@host"
