"""Proving after the fact that a run had every sample exactly once, in the order that its seed gives.

From (seed, position) alone the samples of every step are computed again and compared, as a sum, with what
the workers had really read; and the steps that stand must follow each other without a gap or an overlap,
over all restarts, batch sizes, numbers of ranks and returns to earlier checkpoints.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from perdure.catalog.root import Root
from perdure.data.cursor import BatchPlan
from perdure.data.growth import grown
from perdure.data.identity import differences
from perdure.data.order import Order
from perdure.data.record import StreamRecord
from perdure.data.samples import sample_sums
from perdure.train.blame import Fault, faulty_samples
from perdure.train.ledger import Header, Ledger, Step, read_ledger
from perdure.train.vouching import check_commits

__all__ = ["AuditReport", "Finding", "audit"]

LEDGER = "ledger.jsonl"
_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Finding:
    """Something that is not as it must be.

    Attributes:
        kind: "repeated", "missing", "replaced", "swapped", "other samples", "batch", "step", "data", "jump",
            "ledger" or "commit".
        what: a sentence.
        step: where known.
        samples: stream positions [first, last) concerned, where known.
        index: the data set index concerned, where known.
    """

    kind: str
    what: str
    step: int | None = None
    samples: tuple[int, int] | None = None
    index: int | None = None


@dataclass
class AuditReport:
    """What an audit found.

    Attributes:
        path: the ledger.
        attempts: starts of the command that wrote to it.
        steps, samples: that stand, and the samples of their batches.
        first, last: stream positions [first, last) that they consumed.
        epochs: how often the data set was gone through, where its length is known.
        superseded, returns: steps that a later attempt has replaced, and how often that happened.
        left_out: stream positions left out on purpose.
        commits: checkpoints that vouch for the ledger and were compared with it.
        recomputed: whether the samples themselves were compared, not only positions.
        findings: what is wrong; empty when every sample was had exactly once.
        notes: what is worth knowing and not wrong.
    """

    path: str
    attempts: int = 0
    steps: int = 0
    samples: int = 0
    first: int = 0
    last: int = 0
    epochs: float = 0.0
    superseded: int = 0
    returns: int = 0
    left_out: int = 0
    commits: int = 0
    recomputed: bool = True
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings


def audit(output_dir: str, *, save_path: str | None = None) -> AuditReport:
    """Checks the ledger of a run; reads nothing but the ledger and the commits.

    Args:
        output_dir: of the run.
        save_path: where its checkpoints are; default: `checkpoint` in `output_dir`.

    Raises:
        UsageError: there is no ledger.
        DataError: it cannot be read, or its order is of a version that is not known here.
    """
    path = os.path.join(output_dir, LEDGER)
    ledger = read_ledger(path)
    report = AuditReport(
        path=path,
        attempts=len({header.attempt for header in ledger.headers}),
        superseded=ledger.superseded,
        returns=ledger.returns,
    )
    for number in ledger.unreadable:
        report.findings.append(Finding("ledger", f"line {number} of the ledger cannot be read"))
    _Walk(ledger, report).run()
    root = Root(save_path or os.path.join(output_dir, "checkpoint"))
    report.commits, problems = check_commits(path, ledger, root)
    report.findings += [Finding("commit", problem) for problem in problems]
    return report


class _Walk:
    """One pass over the steps that stand."""

    def __init__(self, ledger: Ledger, report: AuditReport) -> None:
        self._ledger, self._report = ledger, report
        self._before: Step | None = None
        self._record: StreamRecord | None = None
        self._plan: BatchPlan | None = None
        self._order: Order | None = None
        # Steps whose samples are computed in one go.
        self._pending: list[tuple[Step, list[range]]] = []
        self._amount = 0

    def run(self) -> None:
        report, current = self._report, -2
        for number, step in self._ledger.standing:
            if number < 0:
                report.findings.append(
                    Finding("ledger", f"step {step.step} stands before any attempt's head", step.step)
                )
                return
            header = self._ledger.headers[number]
            expected_position = expected_step = None
            if number != current:
                self._enter(header)
                current, expected_position, expected_step = number, header.consumed_samples, header.step + 1
            elif self._before is not None:
                expected_position, expected_step = self._before.samples[1], self._before.step + 1
            if header.attempt != step.attempt:
                self._find("ledger", step, f"it is of attempt {step.attempt}, in the lines of {header.attempt}")
            self._check(step, expected_position, expected_step)
            self._before = step
        self._check_pending()
        report.findings.sort(key=lambda finding: finding.step or 0)
        if self._ledger.standing:
            first, last = self._ledger.standing[0][1], self._ledger.standing[-1][1]
            report.first, report.last = first.samples[0], last.samples[1]
            if self._record is not None and self._record.length:
                report.epochs = (report.last - report.first) / self._record.length

    def _enter(self, header: Header) -> None:
        """The steps of another attempt, or from after a return, begin."""
        self._check_pending()
        before, report, record = self._before, self._report, header.data
        reached = before.samples[1] if before is not None else self._begun(header.parent_attempt)
        if reached is not None and reached != header.parent_samples:
            self._jump(header, reached, header.parent_samples, "the ledger lacks the steps in between")
        elif reached is None and header.parent_samples:
            report.notes.append(
                f"the ledger begins at stream position {header.parent_samples}; what came before is in another one"
            )
        if header.consumed_samples != header.parent_samples and header.resumed is not None:
            self._moved(header)
        afresh = bool(header.moved.get("ignore_data_skip"))
        if record is None:
            report.findings.append(Finding("data", f"attempt {header.attempt} does not say which data it had"))
            self._record = self._plan = self._order = None
            return
        if self._record is not None and not afresh and before is not None:
            self._compare(header, self._record, record)
        self._record, self._plan, self._order = record, record.plan(), record.order()
        if self._order is None:
            report.recomputed = False
            report.notes.append(
                f"attempt {header.attempt}: the data give their samples in an order of their own, which cannot be "
                "computed again; positions were checked, samples were not"
            )

    def _begun(self, attempt: str) -> int | None:
        """The stream position at which an attempt began; None where this ledger has no head of it."""
        return next((each.consumed_samples for each in self._ledger.headers if each.attempt == attempt), None)

    def _moved(self, header: Header) -> None:
        report, old, new = self._report, header.parent_samples, header.consumed_samples
        if header.moved.get("ignore_data_skip"):
            report.notes.append(f"attempt {header.attempt} began the data afresh at step {header.step}, on purpose")
        elif header.moved.get("data_skip_steps") and new > old:
            report.left_out += new - old
            report.notes.append(
                f"attempt {header.attempt} left out stream positions [{old}, {new}) on purpose (data_skip_steps)"
            )
        else:
            self._jump(header, old, new, "and nothing says that this was meant")

    def _jump(self, header: Header, old: int, new: int, why: str) -> None:
        kind = "missing" if new > old else "repeated"
        low, high = min(old, new), max(old, new)
        what = (
            f"stream positions [{low}, {high}) are {kind}: attempt {header.attempt} goes on at {new}, not {old}; {why}"
        )
        self._report.findings.append(Finding(kind, what, header.step, (low, high)))

    def _compare(self, header: Header, old: StreamRecord, new: StreamRecord) -> None:
        consumed = header.consumed_samples
        longer = bool(old.lengths) and new.length > old.length
        has_grown = longer and new.lengths == list(grown(tuple(old.lengths), new.length, consumed))
        changed = differences(old.identity, new.identity, consumed_samples=consumed, grown=has_grown)
        if not (has_grown or new.lengths == old.lengths):
            changed.append(f"lengths: {old.lengths} -> {new.lengths}")
        if has_grown:
            self._report.notes.append(
                f"attempt {header.attempt}: the data had grown to {new.length} samples, taken in from stream position "
                f"{new.lengths[-1][0]} on"
            )
        changed += [
            f"{key}: {getattr(old, key)} -> {getattr(new, key)}"
            for key in ("kind", "version", "seed", "shuffle")
            if getattr(old, key) != getattr(new, key)
        ]
        if changed and not header.moved:
            what = f"attempt {header.attempt} went on with other data: {'; '.join(changed)}"
            self._report.findings.append(Finding("data", what, header.step))

    def _check(self, step: Step, position: int | None, number: int | None) -> None:
        report = self._report
        first, last = step.samples
        if number is not None and step.step != number:
            self._find("step", step, f"step {number} was to come")
        if position is not None and first != position:
            kind = "repeated" if first < position else "missing"
            low, high = min(first, position), max(first, position)
            self._find(kind, step, f"stream positions [{low}, {high}) are {kind}", (low, high))
        report.steps += 1
        report.samples += step.global_batch_size
        if self._plan is None:
            return
        planned = self._plan.step_range(first)
        if (planned.last, planned.global_batch_size) != (last, step.global_batch_size):
            self._find(
                "batch",
                step,
                f"it took {step.global_batch_size} samples up to position {last}, where {planned.global_batch_size} up "
                f"to {planned.last} were due",
                (first, last),
            )
        runs = self._plan.skips.runs(first, last)
        kept = sum(len(run) for run in runs)
        report.left_out += last - first - kept
        if self._order is not None and kept:
            self._pending.append((step, runs))
            self._amount += kept
            if self._amount > _AT_ONCE:
                self._check_pending()

    def _check_pending(self) -> None:
        """Computes the samples of the steps in hand again."""
        pending, self._pending, self._amount = self._pending, [], 0
        if self._order is None or not pending:
            return
        counts = [sum(len(run) for run in runs) for _, runs in pending]
        indices = self._order.gather([(run.start, run.stop) for _, runs in pending for run in runs])
        positions = [position for _, runs in pending for run in runs for position in run]
        place = 0
        for (step, _), count, expected in zip(pending, counts, sample_sums(positions, indices, counts), strict=True):
            if expected != step.sum:
                length = self._record.length if self._record is not None else 0
                mine = slice(place, place + count)
                fault = faulty_samples(positions[mine], indices[mine], step.sum - expected, length)
                self._report.findings.append(_finding(fault, step))
            place += count

    def _find(self, kind: str, step: Step, what: str, samples: tuple[int, int] | None = None) -> None:
        self._report.findings.append(
            Finding(kind, f"step {step.step} (attempt {step.attempt}): {what}", step.step, samples)
        )


def _finding(fault: Fault, step: Step) -> Finding:
    where = (fault.position, fault.position + 1) if fault.position is not None else step.samples
    text = f"step {step.step} (attempt {step.attempt}): {fault.what}"
    return Finding(fault.kind, text, step.step, where, fault.index)
