"""`python -m lightning_mgpu` and the console script `lightning-mgpu`."""

from lightning_mgpu.cli.main import main

if __name__ == "__main__":
    main()
