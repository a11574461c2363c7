"""A call that waits or fails costs seconds and a line, never the run."""

import time

import pytest
from lightning_mgpu.tracking.in_time import in_time


def test_what_succeeds_says_nothing(capsys: pytest.CaptureFixture) -> None:
    done: list[int] = []
    assert in_time("it", lambda: done.append(1)) and done == [1] and capsys.readouterr().out == ""


def test_what_waits_is_left_behind(capsys: pytest.CaptureFixture) -> None:
    start = time.monotonic()
    assert not in_time("it", lambda: time.sleep(60), 0.1) and time.monotonic() - start < 20
    assert capsys.readouterr().out == "wandb:    it was not uploaded: the server does not answer within 0.1 s\n"


def test_what_fails_is_one_line_without_secrets(capsys: pytest.CaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("https://me:hunter2@host\nand more")

    assert not in_time("it", fail)
    assert capsys.readouterr().out == "wandb:    it was not uploaded: RuntimeError: https://***@host\n"
