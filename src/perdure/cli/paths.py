"""Paths on the command line."""

from __future__ import annotations

import os
from typing import Any

import click

from perdure.format.names import is_address

__all__ = ["FilePath"]


class FilePath(click.Path):
    """A path of a mounted file system. `s3://bucket/run` would otherwise name a strange local directory."""

    def convert(self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, as `click.Path` gives it.

        Raises:
            click.BadParameter: it is an address, or not as it should be.
        """
        if is_address(os.fspath(value)):
            self.fail(f"{os.fspath(value)} is an address; expected a path of a mounted file system", param, ctx)
        return super().convert(value, param, ctx)
