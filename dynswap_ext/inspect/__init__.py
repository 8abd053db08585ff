"""Inspects models, plain or installed: layers, memory, gradients. Results are values that print as tables."""

from __future__ import annotations

from dynswap_ext.inspect._forward import Call
from dynswap_ext.inspect._model import WeightLocation
from dynswap_ext.inspect.gradients import (
    Gradient,
    GradientFlow,
    GradientHealth,
    gradient_flow,
    gradient_health,
)
from dynswap_ext.inspect.memory import MemoryProfile, memory_profile
from dynswap_ext.inspect.summary import Layer, Summary, summary

__all__ = [
    "Call",
    "Gradient",
    "GradientFlow",
    "GradientHealth",
    "Layer",
    "MemoryProfile",
    "Summary",
    "WeightLocation",
    "gradient_flow",
    "gradient_health",
    "memory_profile",
    "summary",
]
