"""Documents packed whole into sequences, so that fewer are torn apart.

Where each document goes is decided once, from the documents' lengths alone; a sample is then a pack, and
its content a pure function of its index. The plan takes 24 bytes per piece of a document.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from perdure.data.sources.base import check_seq_length, files_fingerprint
from perdure.errors import DataError, UsageError

__all__ = ["IGNORED", "PackPlan", "Packed", "plan_packs"]

IGNORED = -100


@dataclass(frozen=True)
class PackPlan:
    """Pieces in the order of packs: int64 arrays of shape (pieces,), and where each pack's pieces begin.

    Attributes:
        documents, starts, counts: document, first token in it, and number of tokens of each piece.
        begins: shape (packs + 1,): the pieces of pack p are [begins[p], begins[p + 1]).
    """

    documents: NDArray[np.int64]
    starts: NDArray[np.int64]
    counts: NDArray[np.int64]
    begins: NDArray[np.int64]


def plan_packs(lengths: Sequence[int] | NDArray[np.int64], capacity: int, *, open_packs: int = 8) -> PackPlan:
    """Puts documents, in their order, into the first open pack with room; longer ones are cut first.

    Every token of every document is in exactly one piece, and no pack exceeds the capacity. When no open
    pack has room, the oldest is closed.

    Args:
        lengths: tokens per document.
        capacity: tokens per pack.
        open_packs: how many packs are open at a time; more waste less and keep less of the order.
    """
    packs: list[list[tuple[int, int, int]]] = []
    rooms: dict[int, int] = {}
    for document, length in enumerate(np.asarray(lengths, dtype=np.int64).tolist()):
        for start in range(0, length, capacity):
            count = min(capacity, length - start)
            pack = next((number for number, room in rooms.items() if room >= count), None)
            if pack is None:
                if len(rooms) == open_packs:
                    del rooms[next(iter(rooms))]
                pack = len(packs)
                packs.append([])
                rooms[pack] = capacity
            packs[pack].append((document, start, count))
            rooms[pack] -= count
            if rooms[pack] == 0:
                del rooms[pack]
    pieces = np.array([piece for pack in packs for piece in pack], dtype=np.int64).reshape(-1, 3)
    begins = np.cumsum([0, *(len(pack) for pack in packs)], dtype=np.int64)
    return PackPlan(pieces[:, 0].copy(), pieces[:, 1].copy(), pieces[:, 2].copy(), begins)


class Packed:
    """Documents in packs of `seq_length` tokens: `input_ids` and `labels`, int64 of shape (seq_length,).

    The label of a document's last token, and those of the padding, are -100, which the loss leaves out.

    Args:
        documents: a source that offers `document_lengths()` and `document(index)` (`MegatronIndexed`, the tables
            of token ids), a sequence of sequences of token ids, or a mapping with a source's `type` and keys.
        seq_length: tokens per sample.
        open_packs: see `plan_packs`.
        document_ids: also give `position_ids` (from 0 in each piece) and `document_ids` (from 0 in the pack;
            padding has -1).
        pad_token: fills up `input_ids`.

    Raises:
        DataError: there is no token.
        UsageError: the source cannot tell its documents.
    """

    draws_random = False

    def __init__(
        self,
        documents: Any,
        seq_length: int,
        *,
        open_packs: int = 8,
        document_ids: bool = False,
        pad_token: int = 0,
    ) -> None:
        self.seq_length = check_seq_length(seq_length)
        if open_packs < 1:
            raise UsageError(f"open_packs must be at least 1, not {open_packs}")
        self._source = _source(documents, seq_length)
        self._open_packs = open_packs
        self._document_ids = document_ids
        self._pad = pad_token
        if hasattr(self._source, "document_lengths"):
            lengths = np.asarray(self._source.document_lengths(), dtype=np.int64)
        elif isinstance(self._source, Sequence):
            lengths = np.array([len(document) for document in self._source], dtype=np.int64)
        else:
            raise UsageError(f"{type(self._source).__name__} cannot tell the lengths of its documents")
        self._lengths = lengths
        self._plan = plan_packs(lengths, seq_length, open_packs=open_packs)
        if len(self) == 0:
            raise DataError("there is no token in the documents to pack")

    def __len__(self) -> int:
        return len(self._plan.begins) - 1

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside [0, {len(self)})")
        inputs = np.full(self.seq_length, self._pad, dtype=np.int64)
        labels = np.full(self.seq_length, IGNORED, dtype=np.int64)
        documents = np.full(self.seq_length, -1, dtype=np.int64)
        positions = np.zeros(self.seq_length, dtype=np.int64)
        filled = 0
        begin, end = int(self._plan.begins[index]), int(self._plan.begins[index + 1])
        for number, piece in enumerate(range(begin, end)):
            start, count = int(self._plan.starts[piece]), int(self._plan.counts[piece])
            document = self._document(int(self._plan.documents[piece]))
            following = document[start + 1 : start + count + 1]
            inputs[filled : filled + count] = document[start : start + count]
            labels[filled : filled + len(following)] = following
            documents[filled : filled + count] = number
            positions[filled : filled + count] = np.arange(count)
            filled += count
        sample = {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}
        if self._document_ids:
            sample["position_ids"] = torch.from_numpy(positions)
            sample["document_ids"] = torch.from_numpy(documents)
        return sample

    @property
    def vocab_size(self) -> int | None:
        """The source's, where it says."""
        size: int | None = getattr(self._source, "vocab_size", None)
        return size

    def identity(self) -> dict[str, Any]:
        """Type, number of packs, the settings of packing, and the source's own digest or that of the lengths."""
        own = getattr(self._source, "identity", None)
        fingerprint = own().get("fingerprint") if callable(own) else None
        lengths = self._lengths.tolist()
        return {
            "type": "Packed",
            "length": len(self),
            "fingerprint": fingerprint or files_fingerprint((str(n), length) for n, length in enumerate(lengths)),
            "seq_length": self.seq_length,
            "open_packs": self._open_packs,
        }

    def whereabouts(self, index: int) -> str:
        """The documents in a pack."""
        begin, end = int(self._plan.begins[index]), int(self._plan.begins[index + 1])
        names = ", ".join(str(number) for number in self._plan.documents[begin : min(end, begin + 8)])
        return f"documents {names}{', ...' if end - begin > 8 else ''}"

    def _document(self, number: int) -> NDArray[np.int64]:
        if hasattr(self._source, "document"):
            return np.asarray(self._source.document(number), dtype=np.int64)
        return np.asarray(self._source[number], dtype=np.int64)


def _source(documents: Any, seq_length: int) -> Any:
    if not isinstance(documents, Mapping):
        return documents
    from perdure.data.sources.registry import build_source, source_keys

    kind = documents.get("type")
    if not isinstance(kind, str):
        raise UsageError("documents: needs a `type`")
    keys = {key: value for key, value in documents.items() if key != "type"}
    if "seq_length" in source_keys(kind):
        keys.setdefault("seq_length", seq_length)
    return build_source(kind, keys)
