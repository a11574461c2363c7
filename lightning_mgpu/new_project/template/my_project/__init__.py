"""Classes imported here can be used by their short names: `--model=MyModel`, `--data=MyData`."""

from my_project.data import MyData
from my_project.model import MyModel

__all__ = ["MyData", "MyModel"]
