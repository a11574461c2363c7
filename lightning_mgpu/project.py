"""The program that was started: this package's own, or that of a project that uses it (`new`).

A project calls `main(package="my_project")` of `cli/main.py`. The name is kept in the environment,
so that processes started from here know it.
"""

import os
from importlib.util import find_spec
from pathlib import Path

PACKAGE = __package__.partition(".")[0]
PACKAGE_ENV = "LIGHTNING_MGPU_PACKAGE"


def program() -> str:
    """The package whose command line runs: `lightning_mgpu`, or the project's."""
    return os.environ.get(PACKAGE_ENV, PACKAGE)


def command() -> str:
    """How the program is started, for help and messages: `python -m my_project`."""
    return f"python -m {program()}"


def project_name() -> str:
    """The program's name in `pyproject.toml` and at W&B: `my-project`."""
    return program().replace("_", "-")


def in_own_name(text: str) -> str:
    """The examples in a text with the program's name: `python -m my_project sweep`."""
    return text.replace(f"python -m {PACKAGE} ", f"{command()} ")


def config_dirs() -> list[Path]:
    """Where a `--config` is looked up: the project's `configs/`, then this package's."""
    return [find_configs(package) for package in dict.fromkeys((program(), PACKAGE))]


def find_configs(package: str) -> Path:
    """The `configs/` of a package: inside it where it is a wheel, beside it in a checkout."""
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations is not None
    inside = Path(spec.submodule_search_locations[0]) / "configs"
    return inside if inside.is_dir() else inside.parents[1] / "configs"
