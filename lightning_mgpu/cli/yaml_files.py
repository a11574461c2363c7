"""`--config`: where a YAML file is found, and how it is read."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader

from lightning_mgpu.errors import UsageError

PACKAGE = Path(__file__).parents[1]
CONFIG_DIRS = (PACKAGE / "configs", PACKAGE.parent / "configs")  # of a wheel, of a checkout
CONFIGS = next((path for path in CONFIG_DIRS if path.is_dir()), CONFIG_DIRS[0])


def find_config(name: str) -> Path:
    """The path of a YAML file here or in `configs/`."""
    for path in (Path(name), CONFIGS / name):
        if path.is_file():
            return path
    near = get_close_matches(
        name, [str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.yaml")], n=1
    )
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UsageError(f"--config={name}: no such file, here or in {CONFIGS}{hint}")


def read_config(name: str) -> dict[str, Any]:
    """The options in a file, or in a mapping on the command line."""
    try:
        content = get_loader("yaml")(
            name if name.startswith("{") else find_config(name).read_text(encoding="utf-8")
        )
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--config={name} cannot be read as YAML: {error}") from error
    if not isinstance(content, dict):
        raise UsageError(
            f"--config={name}: it needs options by name, such as 'trainer: {{max_epochs: 3}}'"
        )
    return content
