"""Most tests here need `-p tests.simulated.devices`: test_simulated.py runs them with it."""

import torch

if not hasattr(torch, "sim"):
    collect_ignore = ["test_commands.py", "test_steps.py", "test_watch.py"]
