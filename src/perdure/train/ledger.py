"""Reading ledger.jsonl: attempts, their steps, and which of them stand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from perdure.data.record import StreamRecord
from perdure.errors import DataError, UsageError
from perdure.train.history import take_back

__all__ = ["Header", "Ledger", "Step", "read_ledger"]


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The line at the head of an attempt, or of what follows a return to an earlier checkpoint.

    Attributes:
        attempt: id of the start of the command.
        resumed: sequence of the save that it goes on from; None for a start at step 0.
        parent_attempt, parent_samples: the attempt that made that save, and the position there.
        lineage: of the run.
        step, consumed_samples: where this attempt begins.
        moved: what moved it away from `parent_samples` on purpose: `ignore_data_skip`, `data_skip_steps`.
        data: the sample stream; None in ledgers of early versions.
        why: of a return to an earlier checkpoint.
    """

    attempt: str
    resumed: int | None
    parent_attempt: str = ""
    parent_samples: int = 0
    lineage: str = ""
    step: int
    consumed_samples: int
    moved: dict[str, bool | int] = {}
    data: StreamRecord | None = None
    why: str = ""


class Step(msgspec.Struct, frozen=True):
    """A step's line.

    Attributes:
        attempt, step, global_batch_size: of the step, as it was done.
        samples: stream positions [first, last) that it consumed.
        ids: the sum of `sample_word` over the samples that the ranks really had, in hexadecimal digits.
    """

    attempt: str
    step: int
    global_batch_size: int
    samples: tuple[int, int]
    ids: str

    @property
    def sum(self) -> int:
        """`ids` as a number."""
        return int(self.ids, 16)


@dataclass
class Ledger:
    """What a ledger says.

    Attributes:
        path: the file.
        headers: in order.
        standing: the steps that stand, in the order of training, each with the number of its header.
        superseded: how many steps a later attempt has replaced.
        returns: how often an attempt began before where another had come.
        unreadable: numbers (from 1) of lines that are neither whole nor torn by a crash.
    """

    path: str
    headers: list[Header] = field(default_factory=list)
    standing: list[tuple[int, Step]] = field(default_factory=list)
    superseded: int = 0
    returns: int = 0
    unreadable: list[int] = field(default_factory=list)


def read_ledger(path: str, limit: int | None = None) -> Ledger:
    """Reads a ledger, or its first `limit` bytes.

    A line that a crash tore is the last one, or is followed by the head of the next attempt; it is left out.

    Raises:
        UsageError: there is no such file.
        DataError: it cannot be read.
    """
    ledger, torn = Ledger(path), 0
    for number, line in enumerate(_lines(path, limit), start=1):
        try:
            record: Header | Step = msgspec.json.decode(line, type=Header if b'"resumed"' in line else Step)
        except (msgspec.DecodeError, UnicodeDecodeError):
            if torn:
                ledger.unreadable.append(torn)
            # An empty line is where the next attempt has ended a torn one.
            torn = number if line.strip() else torn
            continue
        if isinstance(record, Header):
            torn = 0
            removed = take_back(
                ledger.standing,
                record.parent_attempt,
                record.parent_samples,
                lambda row: (row[1].samples[0], row[1].attempt),
            )
            ledger.superseded += len(removed)
            ledger.returns += bool(removed)
            ledger.headers.append(record)
            continue
        if torn:
            ledger.unreadable.append(torn)
            torn = 0
        ledger.standing.append((len(ledger.headers) - 1, record))
    return ledger


def _lines(path: str, limit: int | None) -> Iterator[bytes]:
    left = float("inf") if limit is None else limit
    try:
        with open(path, "rb") as file:
            for line in file:
                if left <= 0:
                    return
                yield line if len(line) <= left else line[: int(left)]
                left -= len(line)
    except FileNotFoundError as error:
        raise UsageError(
            f"{path}: there is no ledger", hint="name the output_dir of a run that was trained with Trainer"
        ) from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
