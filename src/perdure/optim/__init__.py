"""Optimizers with named groups, FP32 master weights, the loss scale, and learning rates as functions of the step."""

from __future__ import annotations
