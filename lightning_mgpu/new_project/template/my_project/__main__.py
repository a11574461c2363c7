"""`python -m my_project`: the command line of lightning_mgpu with this project's classes."""

from lightning_mgpu.cli.main import main

if __name__ == "__main__":
    main()
