"""`python -m lightning_mgpu` and the console script `lightning-mgpu`."""

import gc
import sys

from lightning_mgpu.cli.help import short_help


def main() -> None:
    if text := short_help(sys.argv[1:]):  # before anything that takes seconds is imported
        print(text, end="")
        return
    if "lightning_mgpu.cli.main" not in sys.modules:
        gc.disable()  # the imports make millions of objects and no garbage: looking for it takes 1.5 of their 5 seconds
    from lightning_mgpu.cli.main import run

    if not gc.isenabled():
        gc.freeze()
        gc.enable()
    run(sys.argv[1:])


if __name__ == "__main__":
    main()
