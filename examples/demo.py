"""`make demo`: the promise, shown. Trains the quickstart twice, once undisturbed, once killed three times.

Exits 1, loudly, if the two runs differ in any bit of their final state, in any loss, or in any sample.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from perdure.train.history import read_lines, superseded

CONFIG = Path(__file__).with_name("quickstart.yaml")
OUTPUT = Path("output/demo")
PARTIAL = re.compile(r"\.iteration_\d+\.partial-")


def command(directory: Path) -> list[str]:
    return [sys.executable, "-m", "perdure", "train", str(CONFIG), f"output_dir={directory}", *sys.argv[1:]]


def start(directory: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PERDURE_NO_PROGRESS": "1"}
    return subprocess.Popen(command(directory), env=environment, start_new_session=True)


def kill(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def steps_of(directory: Path) -> list[dict[str, Any]]:
    path = directory / "metrics.jsonl"
    return [line for line in read_lines(str(path)) if "loss" in line] if path.exists() else []


def inside_save(directory: Path) -> bool:
    root = directory / "checkpoint"
    return root.exists() and any(PARTIAL.match(name) for name in os.listdir(root))


def killed_run(directory: Path, total: int, rng: random.Random) -> list[tuple[int, str]]:
    """Kills at two random steps and once inside a save; gives (last step, where) of each."""
    points = ["between saves", "between saves", "inside a save"]
    rng.shuffle(points)
    kills: list[tuple[int, str]] = []
    for point in points:
        process = start(directory)
        before = len(steps_of(directory))
        target = before + max(3, rng.randint(total // 8, total // 4))
        while process.poll() is None:
            done = len(steps_of(directory))
            if point == "inside a save" and done > before and inside_save(directory):
                kill(process)
                kills.append((int(steps_of(directory)[-1]["step"]), point))
                break
            if point == "between saves" and done >= target:
                time.sleep(rng.uniform(0, 0.05))
                kill(process)
                kills.append((int(steps_of(directory)[-1]["step"]), point))
                break
            time.sleep(0.0005 if point == "inside a save" else 0.01)
        if process.returncode == 0:
            break
    process = start(directory)
    if process.wait() != 0:
        sys.exit(f"the restarted run failed with exit code {process.returncode}")
    return kills


def same_weights(one: Path, other: Path) -> bool:
    roots = [sorted((d / "checkpoint").glob("iteration_*"))[-1] for d in (one, other)]
    if roots[0].name != roots[1].name:
        return False
    words = [sys.executable, "-m", "perdure", "diff", *map(str, roots), "--json"]
    return subprocess.run(words, stdout=subprocess.DEVNULL).returncode == 0


def consumed_once(lines: list[dict[str, Any]]) -> bool:
    position = 0
    for line in lines:
        first, last = line["samples"]
        if first != position:
            return False
        position = last
    return bool(lines)


def picture(straight: list[dict[str, Any]], killed: list[dict[str, Any]], kills: list[tuple[int, str]]) -> Path:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5))
    axes.plot([s["step"] for s in straight], [s["loss"] for s in straight], lw=4, color="#9ecae1", label="straight")
    axes.plot(
        [s["step"] for s in killed], [s["loss"] for s in killed], lw=1.2, color="#b10026", label="killed, resumed"
    )
    for number, (step, where) in enumerate(kills):
        axes.axvline(step, ls=":", color="black", lw=1, label="kill -9" if number == 0 else None)
        axes.annotate(where, (step, axes.get_ylim()[1]), rotation=90, va="top", ha="right", fontsize=8)
    axes.set(xlabel="step", ylabel="loss", title="Same run, killed three times")
    axes.legend()
    path = OUTPUT / "demo.png"
    figure.savefig(path, dpi=120, bbox_inches="tight")
    return path


def main() -> None:
    shutil.rmtree(OUTPUT, ignore_errors=True)
    seed = int(os.environ.get("DEMO_SEED", str(time.time_ns() % 10**6)))
    straight, killed = OUTPUT / "undisturbed", OUTPUT / "killed"
    print("1/2  an undisturbed run", flush=True)
    if (code := start(straight).wait()) != 0:
        sys.exit(f"the undisturbed run failed with exit code {code}")
    total = len(steps_of(straight))
    print("2/2  the same run, killed with -9 three times and started again", flush=True)
    kills = killed_run(killed, total, random.Random(seed))
    a = superseded(read_lines(str(straight / "metrics.jsonl")))
    b = superseded(read_lines(str(killed / "metrics.jsonl")))
    ids = [superseded(read_lines(str(d / "ledger.jsonl"))) for d in (straight, killed)]
    keys = ("step", "loss", "learning_rate", "grad_norm", "samples")
    losses = [[line[k] for k in keys] for line in a] == [[line[k] for k in keys] for line in b]
    weights = same_weights(straight, killed)
    once = consumed_once(b) and [i["ids"] for i in ids[0]] == [i["ids"] for i in ids[1]]
    redone = len(steps_of(killed)) - len(b)
    rows = {
        "attempts": str(len(kills) + 1),
        "killed at": ", ".join(f"step {step} ({where})" for step, where in kills),
        "steps redone": str(redone),
        "loss identical": "yes" if losses else "NO",
        "weights and optimizer identical": "yes" if weights else "NO",
        "samples consumed exactly once": "yes" if once else "NO",
    }
    print()
    for name, value in rows.items():
        print(f"  {name:<34} {value}")
    print(f"\n  picture: {picture(a, b, kills)}   (seed {seed}; DEMO_SEED={seed} repeats it)")
    (OUTPUT / "demo.json").write_text(json.dumps({**rows, "seed": seed}, indent=1))
    if len(kills) != 3:
        sys.exit(f"only {len(kills)} of 3 kills happened before the run was over: start the demo again")
    if not (losses and weights and once):
        sys.exit("THE RUNS DIFFER: that is a bug, please report it with the folder output/demo")


if __name__ == "__main__":
    main()
