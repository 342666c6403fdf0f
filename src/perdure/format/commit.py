"""commit.json: small, written last. Where it is, the iteration is whole; listing and locating read only this."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from perdure.errors import DamagedCheckpointError, FormatTooNewError
from perdure.format.digest import digest_bytes
from perdure.format.jsonio import decode, encode

__all__ = ["FORMAT", "VERSION", "CommitRecord"]

FORMAT = "perdure"
VERSION = 1
_MOST = 10**18
_TAIL = re.compile(rb',"digest":"(xxh3-128:[0-9a-f]{32})"\}')
_TAIL_BYTES = len(',"digest":"xxh3-128:') + 32 + len('"}')


class CommitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Who, when, lineage, and the digests of the files that say what is where.

    Attributes:
        iteration: the global step, as in the directory's name.
        sequence: number of the save within its lineage, from 1.
        lineage: id drawn when the run started at step 0.
        parent: sequence that the run was resumed from or saved last; 0 for the first.
        attempt: id of the start of the command that saved.
        ranks: number of ranks that saved.
        time: seconds since 1970, UTC.
        writer: program and version.
        size: (`bytes` in the file) size of all files but this one.
        consumed_samples: repeated from common.json so that listing reads one file.
        healthy: repeated from common.json: False where `ckpt_status` is 1.
        metadata_digest, common_digest: tags of the two files' bytes.
        ledger_bytes, ledger_digest: length and tag of ledger.jsonl up to this save; 0 and "" without one.
        digest: tag of this file's bytes before its own `,"digest"`.
    """

    format: str = FORMAT
    version: int = VERSION
    iteration: int
    sequence: int
    lineage: str
    parent: int
    attempt: str
    ranks: int
    time: float
    writer: str
    size: int = msgspec.field(name="bytes")
    consumed_samples: int
    healthy: bool = True
    metadata_digest: str
    common_digest: str
    ledger_bytes: int = 0
    ledger_digest: str = ""
    digest: str = ""

    def encode(self) -> bytes:
        """The bytes of commit.json, own digest last."""
        body = encode(msgspec.structs.replace(self, digest=""))
        head = body.removesuffix(b',"digest":""}')
        return head + b',"digest":"' + digest_bytes(head).encode() + b'"}'

    @classmethod
    def decode(cls, data: bytes, file: str = "commit.json") -> CommitRecord:
        """Reads commit.json and checks its own digest before believing a word of it.

        Raises:
            DamagedCheckpointError: the bytes are not what was written.
            FormatTooNewError: they are, but by a newer version.
        """
        tail = _TAIL.fullmatch(data[-_TAIL_BYTES:])
        if tail is None or digest_bytes(data[:-_TAIL_BYTES]).encode() != tail[1]:
            raise DamagedCheckpointError(f"{file}: its own digest does not hold", file=file)
        head: dict[str, Any] = decode(data, dict, file)
        if head.get("format") != FORMAT:
            raise DamagedCheckpointError(
                f"{file}: format is {str(head.get('format'))[:40]!r}, not {FORMAT!r}", file=file
            )
        version = head.get("version")
        if not isinstance(version, int) or version < 1:
            raise DamagedCheckpointError(f"{file}: version is {str(version)[:40]!r}", file=file)
        if version > VERSION:
            raise FormatTooNewError(
                f"{file}: format version {version}, by {str(head.get('writer'))[:60]}; this program knows {VERSION}",
                hint="install a newer perdure",
            )
        record = decode(data, cls, file)
        counts = (record.iteration, record.parent, record.size, record.consumed_samples, record.ledger_bytes)
        if (
            min(*counts, record.sequence - 1, record.ranks - 1) < 0
            or max(*counts, record.sequence, record.ranks) > _MOST
        ):
            raise DamagedCheckpointError(f"{file}: a count out of range", file=file)
        return record
