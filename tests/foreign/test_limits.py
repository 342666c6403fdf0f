"""Conversions in bounded memory; and killed at any moment, they leave nothing under the final name."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.foreign.ours import perdure
from tests.tiny import in_child, kill_self
from torch import nn

from perdure.catalog.fingerprint import fingerprint
from perdure.cli import render
from perdure.cli.main import run
from perdure.config.schema import CheckpointConfig
from perdure.engine.checkpointer import Checkpointer
from perdure.engine.progress import Progress
from perdure.storage.local import LocalStorage

MIB = 1 << 20
LARGEST = 8 * MIB
ALLOWED = 256 * MIB + LARGEST


class Tall(nn.Module):
    """Many matrices: together far more than a conversion may hold."""

    def __init__(self, count: int, rows: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(rows, 1024)
        self.layers = nn.ModuleDict({str(n): nn.Linear(1024, rows, bias=False) for n in range(count)})


def saved(root: Path, count: int, rows: int, stateless: bool = False) -> Path:
    model = Tall(count, rows)
    kind: Any = torch.optim.SGD if stateless else torch.optim.AdamW
    optimizer = kind(model.named_parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    config = CheckpointConfig(save_path=str(root))
    with Checkpointer(config, model=model, optimizer=optimizer, say=lambda line: None) as keeper:
        keeper.save(Progress(global_step=1, consumed_samples=4, global_batch_size=4), wait=True)
    return root


CONVERSIONS = """
import json, os, shutil, sys
from perdure.cli.main import run

import perdure.convert.dcp, perdure.convert.mindformers, perdure.convert.store, perdure.convert.torchfile

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))

def now():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmRSS"))

found = {}
os.chdir(sys.argv[1])
for words in json.loads(sys.argv[2]):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = now()
    assert run(words) == 0, words
    found[" ".join(words)] = peak() - before
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_no_conversion_holds_more_than_it_may(tmp_path: Path) -> None:
    saved(tmp_path / "full", 13, 1792)  # with moments
    saved(tmp_path / "weights", 34, 2048, stateless=True)
    for root in ("full", "weights"):
        assert sum(p.stat().st_size for p in (tmp_path / root).rglob("*.safetensors")) > ALLOWED
    words = [
        ["reshard", "full", "--ranks", "3", "--to", "three"],
        ["reshard", "three", "--ranks", "1", "--to", "one"],
        ["export", "weights", "--to", "huggingface", "hf"],
        ["import", "--from", "huggingface", "hf", "from-hf"],
        ["export", "full", "--to", "mindformers", "theirs", "--ranks", "2"],
        ["import", "--from", "mindformers", "theirs", "from-theirs"],
        ["export", "weights", "--to", "torch", "model.pt"],
        ["import", "--from", "torch", "model.pt", "from-torch"],
        ["export", "full", "--to", "torch-dcp", "dcp"],
        ["import", "--from", "torch-dcp", "dcp", "from-dcp"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", CONVERSIONS, str(tmp_path), json.dumps(words)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert len(told) == len(words)
    assert {name: held for name, held in told.items() if held > ALLOWED} == {}
    assert fingerprint(tmp_path / "one") == fingerprint(tmp_path / "full") == fingerprint(tmp_path / "from-dcp")


# ---- killed

KILLED = [
    (["reshard", "ours", "--ranks", "3", "--to", "out"], "out/iteration_00000001"),
    (["export", "ours", "--to", "huggingface", "out"], "out"),
    (["export", "ours", "--to", "mindformers", "out", "--ranks", "2"], "out"),
    (["export", "ours", "--to", "torch", "out"], "out"),
    (["export", "ours", "--to", "torch-dcp", "out"], "out"),
    (["import", "--from", "torch-dcp", "dcp", "out"], "out/iteration_00000001"),
]


def killed_at(moment: int, words: list[str]) -> None:
    """Runs a conversion that is killed when so many tensors have passed; at 0, when all is written but the name."""
    passed = 0

    @contextlib.contextmanager
    def progress(label: str, total: int) -> Iterator[Any]:
        def advance(amount: int) -> None:
            nonlocal passed
            passed += 1
            if passed == moment:
                kill_self()

        yield advance

    render.progress = progress
    if moment == 0:
        os.rename = LocalStorage.rename = lambda *given, **named: kill_self()  # type: ignore[assignment,method-assign]
    raise SystemExit(run(words))


@pytest.mark.parametrize(
    ("words", "final"), KILLED, ids=lambda value: "-".join(value[:4]) if isinstance(value, list) else ""
)
def test_a_killed_conversion_leaves_nothing_under_the_final_name(
    words: list[str], final: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(Path("ours"), 3, 64)
    perdure("export", "ours", "--to", "torch-dcp", "dcp")
    for moment in (0, 1, 3):
        assert in_child(lambda moment=moment: killed_at(moment, words)) == -signal.SIGKILL  # type: ignore[misc]
        assert not Path(final).exists()
    Path(".out.partial-elsewhere-1").touch()
    perdure(*words)
    assert Path(final).exists()
    # Of what the killed ones left, nothing stays; what another host may be writing does.
    assert [name for name in os.listdir() if name.startswith(".")] == [".out.partial-elsewhere-1"]


# ---- progress


def test_progress_is_shown_on_a_terminal_and_only_there(tmp_path: Path) -> None:
    saved(tmp_path / "ours", 3, 256)
    words = [sys.executable, "-m", "perdure", "export", str(tmp_path / "ours"), "--to", "torch-dcp"]
    quiet = subprocess.run([*words, str(tmp_path / "a")], capture_output=True, text=True)
    assert (quiet.returncode, quiet.stderr) == (0, "")
    main, side = pty.openpty()
    process = subprocess.Popen([*words, str(tmp_path / "b")], stdout=subprocess.DEVNULL, stderr=side)
    os.close(side)
    shown = b""
    while True:
        try:
            data = os.read(main, 4096)
        except OSError:
            break
        if not data:
            break
        shown += data
    os.close(main)
    assert process.wait() == 0
    assert re.search(rb"export to torch-dcp.*MB", shown)
