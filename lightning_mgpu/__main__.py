"""`python -m lightning_mgpu`, the same as the console script `lightning-mgpu`."""

from lightning_mgpu.cli import main

if __name__ == "__main__":
    main()
