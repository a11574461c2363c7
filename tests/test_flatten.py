"""Dotted keys, as on the command line."""

from lightning_mgpu.flatten import flatten


def test_nested_mappings_become_dotted_keys() -> None:
    nested = {"model": {"class_path": "m.LeNet", "init_args": {"lr": 0.1, "scheduler": None}}, "seed": 1, "empty": {}}
    flat = {"model.class_path": "m.LeNet", "model.init_args.lr": 0.1, "model.init_args.scheduler": None}
    assert flatten(nested) == {**flat, "seed": 1, "empty": {}}


def test_lists_stay_unless_they_hold_mappings() -> None:
    assert flatten({"betas": [0.9, 0.99], "callbacks": [{"class_path": "A", "n": [1]}, {"class_path": "B"}]}) == {
        "betas": [0.9, 0.99],
        "callbacks.0.class_path": "A",
        "callbacks.0.n": [1],
        "callbacks.1.class_path": "B",
    }
