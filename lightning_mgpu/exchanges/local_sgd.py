"""Weights now and then: replicas train apart, and every H updates they exchange how far they came.

Local SGD (McMahan et al., 2017; Stich, 2019) goes on from the mean of the replicas' weights. DiLoCo
(Douillard et al., 2023) takes their mean difference to the last common weights as a gradient, for a
step of SGD with Nesterov momentum. Local SGD is that step with `lr` 1 and no momentum.
"""

from torch import Tensor


def outer_step(
    weights: Tensor, velocity: Tensor, mean_difference: Tensor, lr: float, momentum: float
) -> None:
    """Move the common weights of a parameter, in place."""
    velocity.mul_(momentum).add_(mean_difference)
    weights.sub_(mean_difference + momentum * velocity, alpha=lr)
