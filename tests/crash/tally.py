"""What a sweep has tried and lost, by scenario, operation and way of dying; and a fork that reports back."""

from __future__ import annotations

import json
import os
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tests.crash.disk import VIEWS

__all__ = ["HOWS", "WITHIN", "Tally", "forked"]

HOWS = ("kill-before", "kill-within", "kill-after", *VIEWS)
"""Ways of dying: by SIGKILL before, in the middle of, or after an operation; or of a power cut before it, by what
survived of the un-synced (disk.py)."""

WITHIN = ("write", "append", "pwrite")
"""The operations that have a middle."""

Key = tuple[str, str, str]


@dataclass
class Tally:
    """Counts by (scenario, operation, how), and a sentence for each fault."""

    operations: Counter[str] = field(default_factory=Counter)
    tried: Counter[Key] = field(default_factory=Counter)
    lost: Counter[Key] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def note(self, key: Key, number: int, faults: Iterable[str]) -> None:
        """One try at operation `number`, and what was wrong afterwards."""
        found = list(faults)
        self.tried[key] += 1
        self.lost[key] += bool(found)
        self.faults += [f"{key[0]}: {key[2]} at operation {number}, {key[1]}: {fault}" for fault in found]

    def add(self, other: Tally) -> None:
        """Takes in another sweep's counts."""
        self.operations += other.operations
        self.tried += other.tried
        self.lost += other.lost
        self.faults += other.faults

    def encode(self) -> str:
        """One JSON document."""
        rows = [[*key, count, self.lost[key]] for key, count in self.tried.items()]
        return json.dumps({"operations": self.operations, "rows": rows, "faults": self.faults})

    @classmethod
    def decode(cls, text: str) -> Tally:
        """What `encode` wrote."""
        value = json.loads(text)
        tally = cls(Counter(value["operations"]), faults=value["faults"])
        for scenario, operation, how, tried, lost in value["rows"]:
            tally.tried[scenario, operation, how] = tried
            tally.lost[scenario, operation, how] = lost
        return tally


def forked(work: Callable[[], list[str] | None]) -> tuple[int, list[str]]:
    """Runs `work` in a fork; its exit status (minus the signal that ended it), and the lines that it gave or raised."""
    receiver, sender = os.pipe()
    with warnings.catch_warnings():
        # The child touches no thread of the parent's.
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        code = 0
        try:
            lines = work() or []
        except BaseException:
            code, lines = 3, [traceback.format_exc()]
        with os.fdopen(sender, "w") as pipe:
            json.dump(lines, pipe)
        os._exit(code)
    os.close(sender)
    with os.fdopen(receiver) as pipe:
        said = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), json.loads(said) if said else []
