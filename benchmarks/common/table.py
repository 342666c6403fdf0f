"""Writes docs/reference/performance.md from what the benchmarks found.

python benchmarks/common/table.py
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
PAGE = HERE.parent / "docs" / "reference" / "performance.md"

BEGIN = """# Performance

What saving, loading and training cost, beside the programs that do the same and beside what the machine can do at
best. This page is written by `make bench`; the scripts are in `benchmarks/`, each measures one claim, with all
candidates in turn within one run, and gives medians. Times are ratios at heart: on another machine compare columns,
not seconds. `perdure bench PATH` measures your own storage and state in about a minute.

Everything that is saved here is durable when the clock stops: peers, which leave that to the user, are followed by
`fsync`. Perdure computes a digest of every byte on saving and checks it on loading; the peers check nothing.
"Raw device" is two threads that move aligned memory past the page cache, without files' contents, digests or commits.
"""


def main() -> None:
    PAGE.write_text("\n".join(page()).rstrip() + "\n", encoding="utf-8")
    print(PAGE.relative_to(HERE.parent))


def page() -> Iterator[str]:
    yield BEGIN
    first = next((run["machine"] for name in ("save_load", "async_save") for run in results(name).values()), None)
    if first is not None:
        yield filled(
            f"Measured with torch {first['torch']} and Python {first['python']} on {first['processors']} processors "
            f"({first['architecture']}) with {first['memory_gib']} GiB of memory, a virtual disk with ext4 and no GPU. "
            "The load average when a run began, its own preparations included, stands above each table."
        )
    yield from saves_and_loads()
    yield from asynchronous()
    yield from ranks()
    yield from balanced()
    yield from others()


def results(name: str) -> dict[str, Any]:
    path = HERE / "results" / f"{name}.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def saves_and_loads() -> Iterator[str]:
    titles = {
        "save": "Durable save",
        "load warm": "Load into live tensors, files in the page cache",
        "load cold": "Load into live tensors, nothing in the page cache",
    }
    for run, found in results("save_load").items():
        yield f"## {run}\n"
        yield f"Model and AdamW state. Load average {found['machine']['load_before']}.\n"
        for kind, title in titles.items():
            if kind not in found:
                continue
            rows = found[kind]
            own, raw = rows["perdure"]["median_s"], rows.get("raw device")
            yield f"| {title} | seconds | GiB/s | of raw | times Perdure's | extra memory, MiB |"
            yield "| --- | ---: | ---: | ---: | ---: | ---: |"
            for name, row in rows.items():
                seconds = row["median_s"]
                share = f"{raw['median_s'] / seconds:.0%}" if raw else ""
                speed = f"{found['gib'] / seconds:.2f}" if found["gib"] > 0.01 else ""
                yield (
                    f"| {named(name, kind == 'save')} | {seconds:.3f} | {speed} | {share} | {seconds / own:.2f} | "
                    f"{row['extra_peak_mib']:.0f} |"
                )
            yield ""


def asynchronous() -> Iterator[str]:
    runs = results("async_save")
    if runs:
        yield "## Asynchronous save\n"
        yield filled(
            "*Stall* is how long the training thread is held up, *total* the time until the checkpoint is durable, "
            "*lost* the training time that it costs in all: the stall, and what steps of matrix products on all "
            "processors take longer meanwhile. *Hand-written copy* is the least that a stall can be: one thread copies "
            "the same tensors into memory that it keeps, and saves nothing."
        )
    for run, found in runs.items():
        yield filled(
            f"{run}; load average {found['machine']['load_before']}; a raw write takes {found['raw_write_s']:.3f} s."
        )
        yield "| | stall s | total s | lost s | extra memory, MiB |"
        yield "| --- | ---: | ---: | ---: | ---: |"
        for name, row in found["cases"].items():
            yield (
                f"| {named(name)} | {row['stall_s']:.3f} | {row['total_s']:.2f} | {row['lost_s']:.2f} | "
                f"{row['extra_peak_mib']:.0f} |"
            )
        yield ""


def ranks() -> Iterator[str]:
    runs = list(results("ranks_save").values())
    if not runs:
        return
    yield f"## {runs[0]['ranks']} ranks on one machine\n"
    yield "State of a model and AdamW, which FSDP2 shares out and replication holds on each rank; seconds.\n"
    yield "| | " + " | ".join(f"{run['layout']}, {run['gib']:g} GiB" for run in runs) + " |"
    yield "| --- |" + " ---: |" * len(runs)
    for name in runs[0]["median_s"]:
        yield f"| {name} | " + " | ".join(f"{run['median_s'][name]:.3f}" for run in runs) + " |"
    yield ""


def balanced() -> Iterator[str]:
    found = results("load_balanced")
    runs = {name: rows for name, rows in found.items() if name.endswith(" ranks")}
    if not runs:
        return
    yield "## One state to all ranks of a machine\n"
    yield filled(
        f"A replicated state of {found['gib']:g} GiB{', nothing in the page cache' if found['cold'] else ''}: seconds "
        "of the slowest rank, as a multiple of what one rank takes alone, and GiB read from storage by all. *By hand* "
        "is what `load_balanced` could reach: ranks that know one file's layout beforehand read a part each into "
        "memory that all see and that is there already, digest it, and copy all of it."
    )
    yield "| |" + "".join(f" {name}, s | times one's | GiB read |" for name in runs)
    yield "| --- |" + " ---: | ---: | ---: |" * len(runs)
    for row in next(iter(runs.values())):
        cells = (rows[row] for rows in runs.values())
        yield f"| {row} |" + "".join(f" {c['s']:.3f} | {c['ratio']:.2f} | {c['bytes'] / 2**30:.2f} |" for c in cells)
    yield ""


def others() -> Iterator[str]:
    overhead, start = results("trainer_overhead"), results("start_up")
    if overhead:
        yield "## The Trainer beside a bare loop\n"
        yield filled(
            f"A step that takes {overhead['bare_s'] * 1e3:.1f} ms of processor time takes {overhead['ratio']:.4f} "
            "times as much in the Trainer, with metrics, ledger, health, seeding and progress. With a model of no size "
            f"it adds {overhead['own_s'] * 1e3:.3f} ms, which is {overhead['own_s'] / 0.05:.2%} of a 50 ms step."
        )
    if start:
        yield "## Start-up\n"
        yield "| | CPU seconds | over bare Python |"
        yield "| --- | ---: | ---: |"
        for name, seconds in start.items():
            yield f"| {name} | {seconds:.3f} | {seconds - start['bare Python']:.3f} |"
        yield ""


def named(name: str, saving: bool = False) -> str:
    """A candidate as the page calls it; `saving`: peers that leave durability to the user are followed by fsync."""
    if name == "perdure":
        return "**Perdure**"
    return f"{name} + fsync" if saving and name != "raw device" else name


def filled(text: str) -> str:
    """A paragraph, wrapped as the other pages are."""
    return textwrap.fill(text, 118) + "\n"


if __name__ == "__main__":
    main()
