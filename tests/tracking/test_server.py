"""Online only where somebody is logged in and the server answers; nothing is asked of anybody, nothing waits."""

import time
from pathlib import Path
from typing import Any

import pytest
import wandb
from lightning_mgpu.tracking import server as module
from lightning_mgpu.tracking.server import choose_mode

BAD = {
    "refuse": "127.0.0.1 cannot be reached: ",
    "hang": "127.0.0.1 does not answer within 1 s",
    "500": "127.0.0.1 answers with HTTP 500",
}


@pytest.fixture
def logged_in(server: Any, key: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    monkeypatch.setattr(module, "REACH_SECONDS", 1.0)
    wandb.teardown()
    return server


def test_without_login_runs_are_offline() -> None:
    assert choose_mode("auto") == choose_mode("online") == ("offline", "no login")


def test_with_login_and_a_server_that_answers_they_are_online(logged_in: Any) -> None:
    assert choose_mode("auto") == choose_mode("online") == ("online", "logged in")
    logged_in.behave = "401"  # whether the login is good, W&B finds out
    assert choose_mode("auto") == ("online", "logged in")


@pytest.mark.parametrize("how", BAD)
@pytest.mark.parametrize("asked", ["auto", "online"])
def test_a_bad_server_means_offline_at_once(logged_in: Any, how: str, asked: str) -> None:
    if how == "refuse":
        logged_in.stop()
    else:
        logged_in.behave = how
    start = time.monotonic()
    mode, reason = choose_mode(asked)
    assert mode == "offline" and reason.startswith(BAD[how])
    assert time.monotonic() - start < 20


def test_a_name_that_cannot_be_looked_up_is_not_waited_for(logged_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.getaddrinfo", lambda *args, **kwargs: time.sleep(60))
    start = time.monotonic()
    assert choose_mode("auto") == ("offline", BAD["hang"])
    assert time.monotonic() - start < 20


def test_the_reason_holds_no_password(logged_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ask", lambda url: "cannot be reached: https://me:hunter2@proxy")
    assert choose_mode("auto") == ("offline", "127.0.0.1 cannot be reached: https://***@proxy")


@pytest.mark.parametrize(("value", "mode"), [("dryrun", "offline"), ("offline", "offline"), ("disabled", "disabled")])
def test_environment_goes_before_auto(monkeypatch: pytest.MonkeyPatch, value: str, mode: str) -> None:
    monkeypatch.setenv("WANDB_MODE", value)
    assert choose_mode("auto") == (mode, f"WANDB_MODE={mode}")
    assert choose_mode("disabled") == ("disabled", "--wandb.mode=disabled")


def test_netrc_is_a_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert module._is_logged_in("api.wandb.ai")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    assert not module._is_logged_in("api.wandb.ai")
