"""YAML files: truncated, shuffled, repeated, endless; none of them is read as something else than it says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

GOOD = """\
trainer:
  max_epochs: 3
  accelerator: cpu
  devices: 1
model:
  class_path: lightning_mgpu.models.LeNet
  init_args:
    optimizer:
      class_path: torch.optim.SGD
      init_args:
        lr: 0.1
data:
  class_path: lightning_mgpu.data.FashionMNIST
  init_args:
    batch_size: 64
    source: synthetic
"""
WRONG: dict[str, tuple[str | bytes, str]] = {
    "key twice": ("trainer:\n  max_epochs: 1\n  max_epochs: 9\n", "line 3: max_epochs stands twice"),
    "section twice": (
        "trainer:\n  max_epochs: 1\ndata: null\ntrainer:\n  devices: 1\n",
        "line 4: trainer stands twice",
    ),
    "tab": ("trainer:\n\tmax_epochs: 1\n", "line 2: found character '\\t'"),
    "binary": (b"\x80\x81\xff\x00", "cannot be read as YAML"),
    "control character": ("trainer: \x07\n", "cannot be read as YAML"),
    "UTF-16": ("trainer: {devices: 1}".encode("utf-16"), "cannot be read as YAML"),
    "two documents": ("trainer: {devices: 1}\n---\ntrainer: {devices: 2}\n", "found another document"),
    "very deep": ("trainer: " + "[" * 2000, "nested too deeply"),
    "an alias of nothing": ("trainer: *a\n", "found undefined alias"),
    "contains itself": ("trainer: &a\n  devices: *a\n", "repeats or contains itself"),
    "billions": (
        "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9 if i else ['1'] * 9)}]\n" for i in range(12)),
        "alias",
    ),
    "a date": ("trainer: {max_epochs: 2020-13-45}\n", "--trainer.max_epochs=2020-13-45: expected a whole number"),
    "base 60": ("trainer:\n  max_epochs: 1:30\n", "line 2: 1:30 would be read as a number of base 8 or 60"),
    "base 8": ("trainer:\n  max_epochs: 010\n", "line 2: 010 would be read as a number of base 8 or 60"),
    "Python": ("trainer: !!python/object/apply:os.system ['touch pwned']\n", "could not determine a constructor"),
    "text": ("fit", "holds a str"),
    "NaN": ("model: {class_path: LeNet, init_args: {optimizer: {class_path: SGD, init_args: {lr: .nan}}}}\n", "finite"),
    "a list for a section": ("trainer: [max_epochs, 3]\n", "trainer"),
    "a number for a section": ("trainer: 3\n", "trainer"),
    "a number for a key": ("trainer: {1: 2}\n", "1"),
    "a key that is a number": ("1: 2\n", "1"),
    "no such class": ("data: {class_path: lightning_mgpu.data.Nope}\n", "no such LightningDataModule"),
    "another kind of class": ("model: {class_path: torch.nn.Linear}\n", "no such LightningModule"),
    "no class": ("model: {class_path: os.system}\n", "no such LightningModule"),
    "a class path that is a number": ("model: {class_path: 3}\n", "model"),
    "arguments of no class": ("model: {init_args: {hidden: 3}}\n", "hidden"),
    "unknown argument": ("model: {class_path: LeNet, init_args: {hidden: 3}}\n", "hidden"),
    "arguments that are a list": ("model: {class_path: LeNet, init_args: [3]}\n", "model"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_file(ends: Callable, tmp_path: Path, case: str) -> None:
    content, said = WRONG[case]
    (tmp_path / "wrong.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert said in ends("fit", "--config=wrong.yaml").error
    assert not (tmp_path / "pwned").exists()


def test_aliases_and_merges_are_fine(ends: Callable, tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(
        "trainer: {max_epochs: &n 2, max_steps: *n, accelerator: cpu}\n"
        "data: {class_path: FashionMNIST, init_args: {<<: {batch_size: 8}, batch_size: 9}}\n"
    )
    config = ends("fit", "--config=good.yaml", "--data.source=synthetic").config
    assert config.trainer.max_steps == 2 and config.data.init_args.batch_size == 9


@st.composite
def mutations(draw: st.DrawFn) -> str:
    lines = GOOD.splitlines(keepends=True)
    i = draw(st.integers(0, len(lines) - 1))
    at = draw(st.integers(0, len(GOOD) - 1))
    character = draw(st.sampled_from("\t :-{}[]&*!|>'\"%@#,?0e.\x00\x85\u2028é"))
    return draw(
        st.sampled_from(
            [
                GOOD[:at],
                GOOD[:at] + character + GOOD[at:],
                GOOD[:at] + GOOD[at + 1 :],
                "".join(lines[:i] + lines[i + 1 :]),
                "".join(lines[:i] + [lines[i]] + lines[i:]),
                "".join(lines[:i] + [" " + lines[i]] + lines[i + 1 :]),
                "".join(lines[:i] + [lines[i].lstrip()] + lines[i + 1 :]),
                "".join(lines[i:] + lines[:i]),
            ]
        )
    )


def leaves(content: Any, key: str = "") -> dict[str, Any]:
    if not isinstance(content, dict) or not content:
        return {key: content}
    return {k: v for name, part in content.items() for k, v in leaves(part, f"{key}.{name}").items()}


@settings(max_examples=20)
@given(mutations())
def test_a_changed_file(ends: Callable, tmp_path: Path, content: str) -> None:
    (tmp_path / "changed.yaml").write_text(content)
    config = ends("fit", "--config=changed.yaml", "--data.source=synthetic", "--trainer.accelerator=cpu").config
    if config is None:
        return
    got = leaves(config.as_dict())
    for name, value in leaves(yaml.safe_load(content)).items():
        if value not in (None, {}) and not name.endswith((".class_path", ".source", ".accelerator")):
            assert got.get(name) == value, name
