"""No secret in any form passes; nothing else is touched."""

from pathlib import Path

import pytest
import yaml
from lightning_mgpu.errors import in_one_line
from lightning_mgpu.redact import redact, redact_arguments, redact_values


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password out-of-netrc\n")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("SOME_API_KEY", "from-the-environment")
    monkeypatch.setenv("QUOTED_SECRET", 'it\'s "clé"')
    monkeypatch.setenv("SERVICE_SECRET", "lightning")  # a word of its own
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
        ("the password is lightning.", "the password is ***."),
        ("api_key: abcdef1234567890", "api_key: '***'"),
        ("model:\n  password: hunter2\n  lr: 0.1", "model:\n  password: '***'\n  lr: 0.1"),
        ('{"class_path": "X", "api_key":"abc", "a": 1}', '{"class_path": "X", "api_key":"***", "a": 1}'),
        ("{class_path: X, token: abcdef1234567890}", "{class_path: X, token: '***'}"),
    ],
)
def test_secrets_are_hidden(text: str, shown: str) -> None:
    assert redact(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        *("a short story", "https://host/x?page=2&monkey=3", "mail me@host", "model.key: 3", "lr: 0.1\ntokens: 5\n"),
        *("class_path: lightning_mgpu.models.LeNet", "class_path: lightning.pytorch.Trainer"),
        *("key: pixel_values\npad_token: '<|endoftext|>'\npassword: null\n", "api_key:\n  path: x"),
        "error: --token=3: wrong",
    ],
)
def test_nothing_else_is_touched(text: str, tmp_path: Path) -> None:
    assert redact(text) == text
    assert redact(str(tmp_path / "netrc")) == str(tmp_path / "netrc")


def test_error_lines_hide_secrets() -> None:
    assert in_one_line(ValueError("cannot open\nhttps://me:hunter2@host")) == "cannot open https://***@host"


@pytest.mark.parametrize(
    "value",
    ['it\'s "clé"', "from-the-environment", "- from-the-environment", 'https://h/?token=abc"x', 'a: it\'s "clé"'],
)
@pytest.mark.parametrize("name", ["root", "api_key"])
def test_hidden_in_values_and_in_yaml(value: str, name: str) -> None:
    """In quotes and beyond ASCII, and what is left can be read."""
    config = {"data": {"init_args": {name: value, "num_workers": 0}}, "list": [value]}
    for found in (redact_values(config), yaml.safe_load(redact(yaml.safe_dump(config, allow_unicode=True)))):
        assert found["data"]["init_args"]["num_workers"] == 0
        for text in (found["data"]["init_args"][name], *found["list"]):
            assert "***" in text and not any(secret in text for secret in ("clé", "environment", "abc"))


def test_values_that_are_no_text_stay() -> None:
    assert redact_values({"key": 3, "password": None, "sizes": [1, 2.5, True]}) == {
        "key": 3,
        "password": None,
        "sizes": [1, 2.5, True],
    }


def test_hidden_on_a_command_line() -> None:
    given = ["fit", "--logger.api_key=abc", "--logger.password", "hunter2", "--url=https://a:b@h", "--token", "--key=3"]
    hidden = ["fit", "--logger.api_key=***", "--logger.password", "***", "--url=https://***@h", "--token", "--key=3"]
    assert redact_arguments(given) == hidden
    assert redact_arguments(["--logger={class_path: X, init_args: {api_key: abc}}"]) == [
        "--logger={class_path: X, init_args: {api_key: '***'}}"
    ]
