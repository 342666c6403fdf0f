"""Shards under new names: found in the files that hold them under their old ones."""

from __future__ import annotations

from math import prod

from perdure.catalog.read import ShardFiles
from perdure.format.dtypes import BY_SAFETENSORS
from perdure.format.metadata import Section, ShardRecord
from perdure.format.rename import Renamed
from perdure.storage.base import FileReader

__all__ = ["RenamedShards"]


class RenamedShards:
    """A `ShardSource` over the files of a checkpoint whose record was renamed.

    Args:
        files: opened by the record with the old names.
        renamed: the record with the new ones.
    """

    def __init__(self, files: ShardFiles, renamed: Renamed) -> None:
        self._files, self._renamed = files, renamed

    def locate(self, section: Section, name: str, shard: ShardRecord) -> tuple[FileReader, int]:
        """The open file that holds a shard, and the offset of the shard's first byte."""
        if (section, name) not in self._renamed.views:
            return self._files.locate(section, name, shard)
        view = self._renamed.views[section, name][shard]
        reader, offset = self._files.locate(section, view.name, view.shard)
        itemsize = BY_SAFETENSORS[self._renamed.metadata.section(section)[name].dtype].itemsize
        return reader, offset + view.skip * prod(shard.shape[1:]) * itemsize

    def file_name(self, shard: ShardRecord) -> str:
        """The path of the file that holds a shard."""
        return self._files.file_name(shard)
