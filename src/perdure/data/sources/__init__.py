"""Sources of samples, by name: see `registry`."""

from __future__ import annotations

from perdure.data.sources.registry import SOURCES, build_source, resolve_source, source_keys

__all__ = ["SOURCES", "build_source", "resolve_source", "source_keys"]
