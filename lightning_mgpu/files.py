"""Files that are whole or not there: written aside, then renamed. Configurations as text."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader


class _Dumper(yaml.SafeDumper):
    """Writes what `--config` reads. Its YAML takes the text `1e-5` for a number, PyYAML's not."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, None if isinstance(_read(text), str) else "'"
    ),
)


def _read(text: str) -> Any:
    with contextlib.suppress(yaml.YAMLError):
        return get_loader("yaml")(text)
    return text


def to_yaml(config: dict[str, Any], in_a_line: bool = False) -> str:
    """A configuration as YAML, in which numbers may be infinite, other than in JSON."""
    style: dict[str, Any] = {"default_flow_style": True, "width": float("inf")} if in_a_line else {}
    return yaml.dump(config, Dumper=_Dumper, sort_keys=False, **style).strip()


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The name to write to: once on disk, the file replaces `path`; if the block fails, it goes."""
    part = path.with_name(f".part.{path.name}")  # the suffix stays: some writers go by it
    try:
        yield part
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        shutil.rmtree(part) if part.is_dir() else part.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """Replace a text file in one step."""
    with replacing(path) as part:
        part.write_text(text)
