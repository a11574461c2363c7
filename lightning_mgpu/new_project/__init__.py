"""`python -m lightning_mgpu new`: a project that depends on this package instead of copying it.

`template/` has the files of the project, in which `my_project` stands for its name.
"""
