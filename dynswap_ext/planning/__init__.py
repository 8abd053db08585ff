"""Predicts time and stalls of a pass under a budget, by the engine on a virtual clock.

Only `measure` runs the model.
"""

from __future__ import annotations

from dynswap_ext.planning.measure import Measured, measure
from dynswap_ext.planning.outline import make_causal_model, outline, outline_of_checkpoint, outline_of_config
from dynswap_ext.planning.plot import plot
from dynswap_ext.planning.predict import Plan, Prediction, plan, predict
from dynswap_ext.planning.rates import ASSUMED, Machine, measure_machine, rows_to_hide, spread, timed
from dynswap_ext.planning.training import SavedTensors, TrainingStep, saved_for_backward, training_steps
from dynswap_ext.planning.weights import Outline, PlannedWeight, outline_of_model

__all__ = [
    "ASSUMED",
    "Machine",
    "Measured",
    "Outline",
    "Plan",
    "PlannedWeight",
    "Prediction",
    "SavedTensors",
    "TrainingStep",
    "make_causal_model",
    "measure",
    "measure_machine",
    "outline",
    "outline_of_checkpoint",
    "outline_of_config",
    "outline_of_model",
    "plan",
    "plot",
    "predict",
    "rows_to_hide",
    "saved_for_backward",
    "spread",
    "timed",
    "training_steps",
]
