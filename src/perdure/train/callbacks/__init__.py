"""Hooks into a run."""
