"""The next trial from those before it: optuna's tree-structured Parzen estimator, under W&B's `method: bayes`.

W&B's server fits a Gaussian process instead: the trials differ, the idea is the same.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_mgpu.runs.errors import UsageError
from lightning_mgpu.sweep.plan import Parameter, Plan, Values, readable

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


def propose(plan: Plan, index: int, seed: int, before: Sequence[tuple[Values, float | None]]) -> Values:
    """The values of a trial, by the seed, its number and the values and metrics (None: failed) of those before it.

    Raises:
        UsageError: If optuna is not installed, or a distribution is none of optuna's.
    """
    try:
        import optuna
    except ImportError as error:
        raise UsageError(
            "method: bayes needs optuna: pip install optuna, or say method: random in the sweep's YAML"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    varied = [parameter for parameter in plan.parameters if parameter.distribution != "constant"]
    space = {parameter.name: _distribution(parameter) for parameter in varied}
    study = optuna.create_study(
        direction="maximize" if plan.maximize else "minimize",
        sampler=optuna.samplers.TPESampler(seed=seed + index, n_startup_trials=5),
    )
    for values, metric in before:
        params = {parameter.name: _to_optuna(parameter, values[parameter.name]) for parameter in varied}
        # a trial without a metric counts as the worst: its surroundings are not tried again and again
        state = optuna.trial.TrialState.PRUNED if metric is None else optuna.trial.TrialState.COMPLETE
        study.add_trial(optuna.create_trial(state=state, value=metric, params=params, distributions=space))
    asked = study.ask(space).params
    constants = {p.name: p.options["value"] for p in plan.parameters if p.distribution == "constant"}
    found = {p.name: _from_optuna(p, asked[p.name]) for p in varied}
    return dict(sorted({**constants, **found}.items()))


def _distribution(parameter: Parameter) -> "BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    p = parameter.options
    if parameter.distribution == "categorical":
        return CategoricalDistribution(range(len(p["values"])))
    if parameter.distribution == "int_uniform":
        return IntDistribution(p["min"], p["max"])
    if parameter.distribution in ("uniform", "log_uniform_values"):
        return FloatDistribution(p["min"], p["max"], log=parameter.is_log)
    if parameter.distribution == "q_uniform":
        return FloatDistribution(p["min"], p["max"], step=p["q"])
    raise UsageError(
        f"{parameter.name}: distribution: {parameter.distribution}: method: bayes takes values, int_uniform, uniform, "
        "q_uniform and log_uniform_values; or say method: random"
    )


def _to_optuna(parameter: Parameter, value: Any) -> Any:
    return parameter.options["values"].index(value) if parameter.distribution == "categorical" else value


def _from_optuna(parameter: Parameter, value: Any) -> Any:
    if parameter.distribution == "categorical":
        return parameter.options["values"][value]
    return (
        value
        if isinstance(value, int)
        else min(max(readable(value), parameter.options["min"]), parameter.options["max"])
    )
