"""Run directories: creating, recording, stopping and resuming runs."""
