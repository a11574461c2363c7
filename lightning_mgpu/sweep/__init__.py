"""Many runs of one YAML, no account: `python -m lightning_mgpu sweep`."""
