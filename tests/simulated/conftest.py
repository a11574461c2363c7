"""Most tests here need `-p tests.simulated.devices`; test_simulated.py runs them with it."""

import torch

with_devices = ["test_commands.py", "test_steps.py"]
collect_ignore = ["test_simulated.py"] if hasattr(torch, "sim") else with_devices
