"""`python -m lightning_mgpu` and the console script `lightning-mgpu`."""

import os
import sys

from lightning_mgpu.cli.help import short_help
from lightning_mgpu.cli.project import PACKAGE, PACKAGE_ENV


def main(package: str = PACKAGE) -> None:
    """Run a command line; `package` is that of a project that uses this one (`new`)."""
    os.environ[PACKAGE_ENV] = package
    if text := short_help(sys.argv[1:]):  # before anything that takes seconds is imported
        print(text, end="")
        return
    from lightning_mgpu.cli.main import run

    run(sys.argv[1:])


if __name__ == "__main__":
    main()
