"""`self.log` and torchmetrics: a step split over replicas logs what one device would.

| file             | what is in it                                             |
| ---------------- | --------------------------------------------------------- |
| `recording.py`   | written down while replicas run                           |
| `replay.py`      | and done once afterwards, exact over replicas             |
| `log_calls.py`   | calls of `log` from wherever they come                    |
| `batch_sizes.py` | what `log(batch_size=...)` means in a step that was split |
"""
