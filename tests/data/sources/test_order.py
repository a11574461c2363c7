"""The order of the sources, and the message when all of them fail."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_mgpu.data import sources
from lightning_mgpu.data.sources import DataSourceError


@pytest.mark.parametrize("winner", ["system", "torchvision", "package"])
def test_sources_are_tried_in_order(
    winner: str,
    root: Path,
    tmp_path: Path,
    system_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    ensure: Callable,
    assert_complete: Callable,
) -> None:
    order, asked = ["system", "torchvision", "package"], []

    def fake(name: str) -> Path:
        asked.append(name)
        if name != winner:
            raise sources._Unavailable("not this one")
        return system_dir

    monkeypatch.setattr(sources, "_download", lambda files, work: fake("torchvision"))
    monkeypatch.setattr(sources, "_unpack_package", lambda work: fake("package"))
    phrase = ensure(root, system_dir=system_dir if winner == "system" else tmp_path / "nothing")
    assert asked == [name for name in order[: order.index(winner) + 1] if name != "system"]
    assert {"system": "Debian package", "torchvision": "torchvision download", "package": "apt-get"}[winner] in phrase
    assert_complete(root)


@pytest.mark.parametrize("source", ["local", "system", "torchvision", "package"])
def test_a_named_source_is_the_only_one_asked(
    source: str, root: Path, system_dir: Path, monkeypatch: pytest.MonkeyPatch, ensure: Callable
) -> None:
    if source == "system":
        system_dir = Path("/nonexistent")
    with pytest.raises(DataSourceError) as caught:
        ensure(root, source, system_dir)
    for other in {"system", "torchvision", "package"} - {source}:
        assert f"{other} (" not in str(caught.value)
    assert f"{source} (" in str(caught.value)


def test_nothing_available_is_one_line_with_every_attempt_and_the_fix(root: Path, raw: Path, ensure: Callable) -> None:
    with pytest.raises(DataSourceError) as caught:
        ensure(root)
    message = str(caught.value)
    attempts = [message.index(f"{name} (") for name in ("local", "system", "torchvision", "package")]
    assert attempts == sorted(attempts) and "\n" not in message
    for part in (f"no files in {raw}", "no files in /nonexistent", "127.0.0.1:9", "no network in tests"):  # the reasons
        assert part in message
    for part in ("apt-get install dataset-fashion-mnist", str(raw), "--data.source=synthetic"):  # the ways out
        assert part in message


def test_unknown_source_names_the_allowed_ones(root: Path, ensure: Callable) -> None:
    with pytest.raises(DataSourceError, match=r"'kaggle'.*auto, local, system, torchvision, package"):
        ensure(root, "kaggle")
    assert not root.exists()
