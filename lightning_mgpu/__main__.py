"""`python -m lightning_mgpu` and the console script `lightning-mgpu`."""

import sys

from lightning_mgpu.cli.help import short_help


def main() -> None:
    if text := short_help(sys.argv[1:]):  # before anything that takes seconds is imported
        print(text, end="")
        return
    from lightning_mgpu.cli.main import run

    run(sys.argv[1:])


if __name__ == "__main__":
    main()
