"""Runs over what people train on: text, a Megatron pair, Parquet; stopped, changed and resumed, evaluated elsewhere."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from pydoc_data import topics
from typing import Any

import pytest
import torch

from perdure import Callback, Trainer
from perdure.train.audit import audit
from perdure.train.compare_ledgers import compare
from perdure.train.history import read_lines
from perdure.train.ledger import read_ledger

pytestmark = pytest.mark.filterwarnings("default")

STEPS, SEQ = 10, 16
DOCUMENTS = [topics.topics[name].encode()[:600] for name in sorted(topics.topics)[:12]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def megatron(folder: Path) -> dict[str, Any]:
    """A pair as Megatron's preprocessing leaves it, written from the description of its format alone."""
    with (folder / "corpus.bin").open("wb") as file:
        for document in DOCUMENTS:
            file.write(struct.pack(f"<{len(document)}H", *document))
    lengths = [len(document) for document in DOCUMENTS]
    starts = [2 * sum(lengths[:number]) for number in range(len(lengths))]
    with (folder / "corpus.idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", 8))
        file.write(struct.pack("<QQ", len(lengths), len(lengths) + 1))
        file.write(struct.pack(f"<{len(lengths)}i", *lengths))
        file.write(struct.pack(f"<{len(starts)}q", *starts))
        file.write(struct.pack(f"<{len(lengths) + 1}q", *range(len(lengths) + 1)))
    return {"type": "MegatronIndexed", "path": str(folder / "corpus"), "seq_length": SEQ}


def parquet(folder: Path) -> dict[str, Any]:
    """Token ids in row groups, written by pyarrow."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet as writer

    flat = b"".join(DOCUMENTS)
    rows = [list(flat[at : at + SEQ + 1]) for at in range(0, 60 * SEQ, SEQ)]
    table = pyarrow.table({"input_ids": pyarrow.array(rows, type=pyarrow.list_(pyarrow.int32()))})
    writer.write_table(table, folder / "rows.parquet", row_group_size=40)
    return {"type": "Parquet", "path": str(folder / "rows.parquet"), "seq_length": SEQ}


def text(folder: Path) -> dict[str, Any]:
    return {"type": "Text", "path": "python-docs", "seq_length": SEQ}


def mixture(folder: Path) -> dict[str, Any]:
    sources = [{**text(folder), "weight": 0.7}, {**megatron(folder), "weight": 0.2}, {**parquet(folder), "weight": 0.1}]
    return {"type": "Mixture", "datasets": sources}


SOURCES = {"text": text, "megatron": megatron, "parquet": parquet, "mixture": mixture}


class Watcher(Callback):
    """Notes what the streams give after each step, evaluated or not."""

    def __init__(self) -> None:
        self.drawn: list[tuple[float, float]] = []

    def on_step_end(self, trainer: Any, state: Any) -> None:
        self.drawn.append((random.random(), float(torch.rand(()))))


def run(output: Path, data: dict[str, Any], steps: int, *overrides: tuple[str, str, Any], watch: Any = None) -> None:
    sections: dict[str, dict[str, Any]] = {
        "training": {"steps": steps, "local_batch_size": 2, "global_batch_size": 4, "seed": 7},
        "model": {
            "type": "decoder",
            "vocab_size": 257,
            "hidden_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "intermediate_size": 8,
        },
        "lr_scheduler": {"type": "ConstantWarmUpLR", "learning_rate": 1e-3},
        "train_dataset": {"num_parallel_workers": 0, "dataloader": {"shuffle": True, **data}},
        "checkpoint": {"auto_resume": True, "save_interleaved_steps": 3},
    }
    for section, key, value in overrides:
        sections.setdefault(section, {})[key] = value
    Trainer({**sections, "output_dir": str(output)}, callbacks=[watch] if watch else []).train()


def rows(output: Path, key: str) -> list[tuple[int, Any]]:
    lines = read_lines(str(output / "metrics.jsonl"))
    return [(line["step"], line[key]) for line in lines if key in line]


@pytest.mark.parametrize("name", SOURCES)
def test_stopped_and_resumed_equals_straight_and_is_proven(tmp_path: Path, name: str) -> None:
    data = SOURCES[name](tmp_path)
    run(tmp_path / "straight", data, STEPS)
    run(tmp_path / "run", data, 4)
    run(tmp_path / "run", data, STEPS, ("train_dataset", "num_parallel_workers", 2))
    ledgers = [read_ledger(str(tmp_path / where / "ledger.jsonl")) for where in ("run", "straight")]
    compared = compare(*ledgers)
    assert compared.same
    assert compared.step_by_step
    assert compared.stretches == STEPS
    assert rows(tmp_path / "run", "loss") == rows(tmp_path / "straight", "loss")
    run(tmp_path / "run", data, 8, ("training", "global_batch_size", 6), ("training", "skip_ranges", [[45, 47]]))
    report = audit(str(tmp_path / "run"))
    assert report.ok, report.findings
    assert report.recomputed
    assert report.left_out == 2


def test_changed_text_is_noticed_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "corpus.txt"
    path.write_bytes(b"\n".join(DOCUMENTS))
    data = {"type": "Text", "path": str(path), "seq_length": SEQ}
    run(tmp_path / "run", data, 3)
    path.write_bytes(b"\n".join(DOCUMENTS) + b"\n" + DOCUMENTS[0])
    with pytest.raises(ValueError, match="length: ") as refused:
        run(tmp_path / "run", data, 6)
    assert "accept_data_growth" in str(refused.value)
    run(tmp_path / "run", data, 6, ("training", "accept_data_growth", True))
    assert audit(str(tmp_path / "run")).ok


def test_evaluation_on_another_source_is_the_same_at_every_start_and_unnoticed(tmp_path: Path) -> None:
    data, other = text(tmp_path), parquet(tmp_path)
    evaluated = (
        ("eval_dataset", "dataloader", other),
        ("eval_dataset", "num_parallel_workers", 0),
        ("training", "eval_interleaved_steps", 2),
    )
    plain, watched = Watcher(), Watcher()
    run(tmp_path / "plain", data, STEPS, watch=plain)
    run(tmp_path / "run", data, 5, *evaluated, watch=watched)
    run(tmp_path / "run", data, STEPS, *evaluated, watch=watched)
    run(tmp_path / "whole", data, STEPS, *evaluated)
    assert rows(tmp_path / "run", "eval_loss") == rows(tmp_path / "whole", "eval_loss")
    assert [step for step, _ in rows(tmp_path / "run", "eval_loss")] == [2, 4, 6, 8, 10]
    assert rows(tmp_path / "run", "loss") == rows(tmp_path / "plain", "loss")
    assert watched.drawn == plain.drawn
    lines = [(tmp_path / name / "ledger.jsonl").read_text().splitlines()[1:6] for name in ("run", "plain")]
    assert [json.loads(line)["ids"] for line in lines[0]] == [json.loads(line)["ids"] for line in lines[1]]
