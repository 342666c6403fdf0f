"""Every file and directory name that Perdure writes: built here, parsed here, and nowhere else.

Parsing is anchored at both ends, so that a name we did not write is never taken for one of ours.
"""

from __future__ import annotations

import os
import re
from typing import Any, NamedTuple

from perdure.errors import UsageError

__all__ = [
    "COMMIT",
    "COMMON",
    "EVENTS",
    "LOCK",
    "METADATA",
    "SHARD_KINDS",
    "TRACKER",
    "Leftover",
    "ShardName",
    "format_tracker",
    "is_address",
    "iteration_dirname",
    "parse_iteration_dirname",
    "parse_leftover",
    "parse_shard_filename",
    "parse_tracker",
    "part_filename",
    "partial_dirname",
    "path_text",
    "removed_dirname",
    "replaced_dirname",
    "shard_filename",
    "temporary_name",
]

TRACKER = "latest_checkpointed_iteration.txt"
COMMIT = "commit.json"
METADATA = "metadata.json"
COMMON = "common.json"
EVENTS = "events.jsonl"
LOCK = "lock"

SHARD_KINDS = ("model", "opt", "extra")

MAX_ITERATION = 10**18
_ITERATION = re.compile(r"iteration_(\d{8}|[1-9]\d{8,18})")
_SEQUENCE = r"0|[1-9]\d{0,17}"
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*://")
_LEFTOVER = re.compile(
    r"\.(?P<iteration>iteration_\d{8,19})"
    rf"\.(?P<why>partial-(?P<attempt>[0-9a-f]{{1,32}})-(?P<seq>{_SEQUENCE})"
    rf"|replaced-(?P<replaced>{_SEQUENCE})|removed-(?P<removed>{_SEQUENCE}))"
)
# Ranks as we write them: a longer number has no leading zero, and none is longer than an index can be.
_RANK = r"\d{7}|[1-9]\d{7,17}"
_SHARD = re.compile(
    rf"(?P<prefix>.+)-(?P<kind>model|opt|extra)-(?P<rank>{_RANK})-(?P<ranks>{_RANK})\.safetensors?", re.S
)


class ShardName(NamedTuple):
    """The parts of a shard file's name; `kind` is one of `SHARD_KINDS`."""

    prefix: str
    kind: str
    rank: int
    ranks: int


class Leftover(NamedTuple):
    """The parts of a dot-directory's name; `why` is `partial`, `replaced` or `removed`."""

    iteration: int
    why: str
    attempt: str
    sequence: int


def iteration_dirname(iteration: int) -> str:
    """`iteration_00002000`: eight digits, zero-padded, growing past eight."""
    if not 0 <= iteration <= MAX_ITERATION:
        raise ValueError(f"iteration {iteration} is outside 0..{MAX_ITERATION}")
    return f"iteration_{iteration:08d}"


def parse_iteration_dirname(name: str) -> int | None:
    """The iteration that a directory name stands for, or None for any other name."""
    match = _ITERATION.fullmatch(name)
    if match is None or not name.isascii():
        return None
    return int(match[1]) if int(match[1]) <= MAX_ITERATION else None


def partial_dirname(iteration: int, attempt: str, sequence: int) -> str:
    """The directory a save is written in before it is published."""
    return f".{iteration_dirname(iteration)}.partial-{attempt}-{sequence}"


def replaced_dirname(iteration: int, sequence: int) -> str:
    """Where an old iteration waits while another writing of the same step takes its name."""
    return f".{iteration_dirname(iteration)}.replaced-{sequence}"


def removed_dirname(iteration: int, sequence: int) -> str:
    """What an iteration is renamed to before its files are deleted."""
    return f".{iteration_dirname(iteration)}.removed-{sequence}"


def parse_leftover(name: str) -> Leftover | None:
    """The parts of a partial, replaced or removed directory's name, or None for any other name."""
    match = _LEFTOVER.fullmatch(name)
    if match is None or not name.isascii():
        return None
    iteration = parse_iteration_dirname(match["iteration"])
    if iteration is None:
        return None
    why = match["why"].partition("-")[0]
    sequence = int(match["seq"] or match["replaced"] or match["removed"])
    return Leftover(iteration, why, match["attempt"] or "", sequence)


def shard_filename(prefix: str, kind: str, rank: int, ranks: int) -> str:
    """`{prefix}-model-0000000-0000008.safetensors`: the shard written by rank 0 of 8."""
    if kind not in SHARD_KINDS:
        raise ValueError(f"shard kind {kind!r} is not one of {', '.join(SHARD_KINDS)}")
    return f"{prefix}-{kind}-{rank:07d}-{ranks:07d}.safetensors"


def parse_shard_filename(name: str) -> ShardName | None:
    """The parts of a shard file's name, read from the right, or None; `.safetensor` is accepted too."""
    match = _SHARD.fullmatch(name)
    if match is None or not (match["rank"] + match["ranks"]).isascii():
        return None
    return ShardName(match["prefix"], match["kind"], int(match["rank"]), int(match["ranks"]))


def part_filename(rank: int) -> str:
    """The record in which a rank says what it wrote; it lives only in a partial directory."""
    return f"part-{rank:07d}.json"


def temporary_name(name: str) -> str:
    """Where a small file is written before it is renamed over `name`."""
    return f".{name}.tmp"


def path_text(path: Any, what: str = "path") -> str:
    """A path that a program was given, as text.

    Raises:
        UsageError: it is none.
    """
    try:
        text = os.fspath(path)
    except TypeError:
        raise UsageError(f"{what}: expected a path, found {type(path).__name__}") from None
    if not isinstance(text, str) or "\0" in text:
        raise UsageError(f"{what}: expected a path as text without NUL characters, found {text!r:.80}")
    return text


def is_address(path: str) -> bool:
    """Whether a text is an address with a scheme (`s3://bucket/run`), which as a path would be a strange local one."""
    return _ADDRESS.match(path) is not None


def format_tracker(iteration: int) -> str:
    """The tracker's text: the decimal iteration, no newline (the reference writes none)."""
    return str(iteration)


def parse_tracker(data: bytes) -> int | None:
    """The iteration that the tracker's bytes name, or None when they name none."""
    text = data[:64].strip()
    if len(data) > 64 or not re.fullmatch(rb"\d{1,19}", text):
        return None
    return int(text) if int(text) <= MAX_ITERATION else None
