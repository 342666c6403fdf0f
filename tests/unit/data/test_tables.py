"""Tables through the `datasets` library."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest

from perdure.data.loader import ResumableLoader
from perdure.data.packing import Packed
from perdure.data.prepare import prepare
from perdure.data.sources import build_source
from perdure.data.sources.tables import IGNORED, HuggingFace, Jsonl, Parquet
from perdure.data.sources.tokenfile import TokenFile
from perdure.errors import DataError, UsageError

pytestmark = pytest.mark.filterwarnings("default")

ROWS = [
    {"text": f"word {number} of many", "input_ids": list(range(number, number + 3 + number % 3))}
    for number in range(20)
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {word: number for number, word in enumerate(["</s>", "?", "word", "of", "many", *map(str, range(20))])}
    made = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_json_lines_and_parquet_give_the_same(jsonl: Path, tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).to_parquet(str(tmp_path / "rows.parquet"))
    lines, table = Jsonl(jsonl, 4), Parquet(tmp_path / "rows.parquet", 4)
    assert len(lines) == len(table) == 20
    for index in range(20):
        assert lines[index]["input_ids"].tolist() == table[index]["input_ids"].tolist()
        assert lines[index]["labels"].tolist() == table[index]["labels"].tolist()
    assert lines[0]["input_ids"].tolist() == [0, 1, 0, 0]
    assert lines[0]["labels"].tolist() == [1, 2, IGNORED, IGNORED]
    assert lines.identity()["fingerprint"] != table.identity()["fingerprint"]
    batches = []
    for num_workers in (0, 2):
        with ResumableLoader(table, global_batch_size=5, num_workers=num_workers) as loader:
            batches.append([batch["labels"].tolist() for step in loader.take(6) for batch in step])
    assert batches[0] == batches[1]


def test_text_is_encoded(jsonl: Path, tokenizer: Path) -> None:
    source = build_source("Jsonl", {"path": str(jsonl), "tokenizer": str(tokenizer), "seq_length": 6})
    assert source.vocab_size == 25
    assert source[3]["input_ids"].tolist() == [2, 8, 3, 0, 0, 0]
    assert source[3]["labels"].tolist() == [8, 3, 4, IGNORED, IGNORED, IGNORED]


def test_saved_folders_and_objects(tmp_path: Path) -> None:
    made = datasets.Dataset.from_list(ROWS)
    made.save_to_disk(str(tmp_path / "saved"))
    source = HuggingFace(tmp_path / "saved", 4)
    assert source[1]["input_ids"].tolist() == [1, 2, 3, 0]
    assert source.identity() == HuggingFace(tmp_path / "saved", 4).identity()
    loader = ResumableLoader(made.select_columns(["text"]), global_batch_size=2, shuffle=False)
    assert next(loader.take()).micro_batches[0].data["text"] == ["word 0 of many", "word 1 of many"]
    with pytest.raises(DataError, match="mapping"):
        ResumableLoader(datasets.DatasetDict(train=made), global_batch_size=1)
    packed = Packed(source, 8)
    assert sum((sample["input_ids"] > 0).sum() for sample in (packed[i] for i in range(len(packed)))) > 0


def test_missing_columns_and_files_are_named(jsonl: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no column 'tokens', only text, input_ids"):
        Jsonl(jsonl, 4, column_names=["tokens"])
    with pytest.raises(DataError, match="No such file"):
        Jsonl(tmp_path / "none.jsonl", 4)
    with pytest.raises(UsageError, match="seq_length is needed"):
        Jsonl(jsonl, tokenizer=jsonl)
    (tmp_path / "bad.jsonl").write_text('{"a": ')
    with pytest.raises(DataError, match=r"bad\.jsonl"):
        Jsonl(tmp_path / "bad.jsonl", 4)


def test_prepare_with_a_tokenizer(tmp_path: Path, tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_text("word 3 of many\nword 4")
    info = prepare([tmp_path / "a.txt"], tmp_path / "t", tokenizer=str(tokenizer))
    assert (info.tokens, info.vocab_size, info.separator) == (7, 25, 0)
    assert TokenFile(tmp_path / "t.bin", 6)[0]["labels"].tolist() == [8, 3, 4, 2, 9, 0]
