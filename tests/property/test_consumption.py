"""Chains of runs on any ranks, batches, ramps and data: each step has the samples of the uninterrupted one.

And the audit, which computes everything anew from the ledger, agrees, or finds what is planted.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perdure.data.loader import ResumableLoader
from perdure.data.mixture import Mixture
from perdure.data.samples import sample_sum, sample_word
from perdure.format.keys import MASK
from perdure.train.audit import audit


@dataclass
class Start:
    """One start of the command: how many steps it does, and from how far back the next one goes on."""

    ranks: int
    local: int
    accumulation: int
    rampup: list[int] | None
    steps: int
    lost: int

    @property
    def batch(self) -> int:
        return self.ranks * self.local * self.accumulation


@dataclass
class Chain:
    dataset: Any
    seed: int
    shuffle: bool
    skip_ranges: list[list[int]]
    starts: list[Start] = field(default_factory=list)


@st.composite
def datasets(draw: st.DrawFn) -> Any:
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    if len(lengths) == 1:
        return range(lengths[0])
    weights = draw(st.lists(st.integers(1, 5), min_size=len(lengths), max_size=len(lengths)))
    return Mixture([range(length) for length in lengths], weights=weights)


@st.composite
def starts(draw: st.DrawFn) -> Start:
    ranks, local, accumulation = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    unit = ranks * local
    ramp = [unit, unit, draw(st.integers(0, 60))] if accumulation > 1 and draw(st.booleans()) else None
    steps = draw(st.integers(1, 6))
    return Start(ranks, local, accumulation, ramp, steps, draw(st.integers(0, steps)))


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    first = st.integers(0, 150)
    ranges = st.lists(st.tuples(first, st.integers(1, 9)).map(lambda pair: [pair[0], sum(pair)]), max_size=3)
    return Chain(
        draw(datasets()),
        draw(st.integers(0, 2**63)),
        draw(st.booleans()),
        draw(ranges),
        draw(st.lists(starts(), min_size=1, max_size=4)),
    )


def loaders(chain: Chain, start: Start) -> list[ResumableLoader]:
    return [
        ResumableLoader(
            chain.dataset,
            global_batch_size=start.batch,
            local_batch_size=start.local,
            seed=chain.seed,
            shuffle=chain.shuffle,
            rank=rank,
            ranks=start.ranks,
            rampup=start.rampup,
            skip_ranges=chain.skip_ranges,
        )
        for rank in range(start.ranks)
    ]


def run(chain: Chain, ledger: Path | None = None) -> list[tuple[int, int, Counter[int]]]:
    """Every step that stands: its positions and its samples, as the loaders of all ranks gave them."""
    lines: list[Any] = []
    standing: list[tuple[int, int, Counter[int]]] = []
    position = step = 0
    for number, start in enumerate(chain.starts):
        on_ranks = loaders(chain, start)
        for loader in on_ranks:
            loader.seek(position)
        lines.append(
            {
                "attempt": f"a{number}",
                "resumed": number or None,
                "parent_attempt": f"a{number - 1}" if number else "",
                "parent_samples": position,
                "step": step,
                "consumed_samples": position,
                "data": on_ranks[0].record(),
            }
        )
        done: list[tuple[int, int, Counter[int], int]] = []
        for batches in zip(*(loader.take(start.steps) for loader in on_ranks), strict=True):
            step += 1
            micro_batches = [micro for batch in batches for micro in batch.micro_batches]
            ids = Counter(index for micro in micro_batches for index in micro.ids)
            total = sum(sample_sum(micro.positions, micro.ids) for micro in micro_batches) & MASK
            first, last, size = batches[0].first, batches[0].last, batches[0].global_batch_size
            assert {(batch.first, batch.last, len(batch)) for batch in batches} == {(first, last, len(batches[0]))}
            lines.append(
                {
                    "attempt": f"a{number}",
                    "step": step,
                    "global_batch_size": size,
                    "samples": [first, last],
                    "ids": f"{total:016x}",
                }
            )
            done.append((first, last, ids, step))
        # At least one step is saved, so that the next start goes on from this one.
        kept = done[: max(1, len(done) - start.lost)]
        standing += [row[:3] for row in (done if number == len(chain.starts) - 1 else kept)]
        position, step = kept[-1][1], kept[-1][3]
    if ledger is not None:
        ledger.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    return standing


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(chains())
def test_each_step_has_the_samples_of_the_uninterrupted_stream(chain: Chain) -> None:
    (whole,) = loaders(chain, Start(1, 1, 1, None, 0, 0))
    expected = 0
    with tempfile.TemporaryDirectory() as directory:
        standing = run(chain, Path(directory, "ledger.jsonl"))
        for first, last, ids in standing:
            assert first == expected
            whole.seek(first)
            samples: Counter[int] = Counter()
            while whole.consumed_samples < last:
                samples.update(next(whole.take(1)).micro_batches[0].ids)
            assert ids == samples
            expected = last
        report = audit(directory)
    assert report.ok, report.findings
    assert (report.steps, report.last) == (len(standing), expected)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(chains(), st.data())
def test_one_wrong_sample_anywhere_is_found(chain: Chain, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        ledger = Path(directory, "ledger.jsonl")
        standing = run(chain, ledger)
        first, last, _ = data.draw(st.sampled_from(standing))
        (whole,) = loaders(chain, Start(1, 1, 1, None, 0, 0))
        kept = [position for part in whole.plan.skips.runs(first, last) for position in part]
        position = data.draw(st.sampled_from(kept))
        whole.seek(position)
        index = next(whole.take(1)).micro_batches[0].ids[0]
        how = data.draw(st.sampled_from(["missing", "other"]) if len(chain.dataset) > 1 else st.just("missing"))
        change = -sample_word(position, index)
        if how == "other":
            indices = st.integers(0, len(chain.dataset) - 1).filter(lambda other: other != index)
            change += sample_word(position, data.draw(indices))
        lines = [msgspec.json.decode(line) for line in ledger.read_bytes().splitlines()]
        planted = [line for line in lines if line.get("samples") == [first, last]][-1]
        planted["ids"] = f"{(int(planted['ids'], 16) + change) & MASK:016x}"
        ledger.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        report = audit(directory)
    assert [(finding.samples, finding.index) for finding in report.findings] == [((position, position + 1), index)]
    assert report.findings[0].kind in (("missing",) if how == "missing" else ("repeated", "replaced"))
