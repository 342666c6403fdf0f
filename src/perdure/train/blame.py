"""Which sample of a step is wrong, told from the step's sum alone.

What a sample adds to the sum can be undone (`index_of`), so one sample that is missing, too many or
another than it should be is found exactly, by one look at each position of the step. That a wrong answer
fits by chance has a probability of (positions x length of the data set) / 2^64.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perdure.data.samples import index_of, sample_word
from perdure.format.keys import MASK

__all__ = ["Fault", "faulty_samples"]

# Pairs are tried one by one, which a step of more samples would make long.
_MOST_FOR_PAIRS = 2048


@dataclass(frozen=True)
class Fault:
    """What is wrong with a step's samples.

    `kind` is "missing", "repeated", "replaced", "swapped" or "other samples"; `position` and `index` are those of
    the sample concerned.
    """

    kind: str
    what: str
    position: int | None = None
    index: int | None = None


def faulty_samples(positions: Sequence[int], indices: Sequence[int], difference: int, length: int) -> Fault:
    """The simplest explanation of a wrong sum.

    Args:
        positions, indices: the samples that the step should have had.
        difference: the sum found less the sum expected.
        length: data set indices are below it.
    """
    difference &= MASK
    words = [sample_word(position, index) for position, index in zip(positions, indices, strict=True)]
    for position, index, word in zip(positions, indices, words, strict=True):
        if (difference + word) & MASK == 0:
            return Fault("missing", f"sample {index} (stream position {position}) is missing", position, index)
    known = set(indices)
    for position, index, word in zip(positions, indices, words, strict=True):
        found = index_of(position, (difference + word) & MASK)
        if found < length:
            if found in known:
                what = f"sample {found} is repeated at stream position {position}, where {index} is missing"
                return Fault("repeated", what, position, index)
            what = f"sample {found} was had at stream position {position} in place of {index}, which is missing"
            return Fault("replaced", what, position, index)
    for position in positions:
        found = index_of(position, difference)
        if found < length:
            return Fault(
                "repeated", f"sample {found} was had once more, as at stream position {position}", position, found
            )
    if len(positions) <= _MOST_FOR_PAIRS:
        for number, (position, index) in enumerate(zip(positions, indices, strict=True)):
            for other in range(number):
                change = (
                    sample_word(position, indices[other])
                    + sample_word(positions[other], index)
                    - words[number]
                    - words[other]
                )
                if change & MASK == difference:
                    what = (
                        f"samples {indices[other]} and {index} are swapped: stream positions {positions[other]} and "
                        f"{position}"
                    )
                    return Fault("swapped", what, positions[other], indices[other])
    what = "its samples are not those of the order: more than one is wrong"
    return Fault("other samples", what)
