"""`python -m lightning_mgpu new`: a project that depends on this package instead of copying it.

`template/` contains the files of the project, with the placeholder `my_project` for its name.
"""
