"""From the losses of the replicas to one gradient.

| file                | what is in it                                                   |
| ------------------- | --------------------------------------------------------------- |
| `losses.py`         | the replicas' losses as one, whose backward pass reaches all    |
| `gradients.py`      | parts of a sum, the sum, and what clipping and hooks make of it |
| `gradient_hooks.py` | hooks on parameters, called with the whole batch's gradient     |
| `flat_gradients.py` | all gradients of a device in one tensor                         |
| `buckets.py`        | gradients packed into flat buckets before they are reduced      |
"""
