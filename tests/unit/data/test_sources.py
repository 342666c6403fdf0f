"""Text, TokenFile, prepare and the registry."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perdure.data.loader import ResumableLoader
from perdure.data.prepare import prepare
from perdure.data.sources import build_source
from perdure.data.sources.text import Text
from perdure.data.sources.tokenfile import TokenFile
from perdure.errors import ConfigError, DataError, PerdureError, UsageError


def tokens_of(source: Any) -> list[int]:
    """All tokens that the windows show, in order; labels must be the inputs one on."""
    tokens: list[int] = []
    for index in range(len(source)):
        sample = source[index]
        inputs, labels = sample["input_ids"].tolist(), sample["labels"].tolist()
        assert len(inputs) == len(labels) == source.seq_length
        assert inputs[1:] == labels[:-1]
        tokens += inputs
    return [*tokens, labels[-1]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    (root / "sub").mkdir(parents=True)
    (root / "b.txt").write_text("zweite Datei: äöü€😀\n")
    (root / "a.txt").write_text("first\n")
    (root / "empty.txt").write_text("")
    (root / "sub" / "c.txt").write_text("third")
    (root / ".hidden").write_bytes(b"\xff")
    return root


def expected_tokens(folder: Path) -> list[int]:
    tokens: list[int] = []
    for name in ("a.txt", "b.txt", "empty.txt", "sub/c.txt"):
        tokens += [*(folder / name).read_bytes(), 256]
    return tokens


@pytest.mark.parametrize("seq_length", [1, 2, 3, 7, 40])
def test_text_shows_every_byte_in_order(folder: Path, seq_length: int) -> None:
    text = Text(folder, seq_length)
    tokens = expected_tokens(folder)
    assert len(text) == (len(tokens) - 1) // seq_length
    assert tokens_of(text) == tokens[: len(text) * seq_length + 1]


def test_token_file_from_prepare_shows_the_same(folder: Path, tmp_path: Path) -> None:
    info = prepare([folder], tmp_path / "out" / "train")
    assert info.tokens == len(expected_tokens(folder))
    assert info.vocab_size == 257
    source = TokenFile(tmp_path / "out" / "train.bin", 5)
    assert source.vocab_size == 257
    assert tokens_of(source) == tokens_of(Text(folder, 5))
    assert sorted(os.listdir(tmp_path / "out")) == ["train.bin", "train.bin.json"]
    wide = prepare([folder / "a.txt", folder / "b.txt"], tmp_path / "wide.bin", dtype="uint32")
    assert wide.dtype == "uint32"
    assert tokens_of(TokenFile(tmp_path / "wide", 3))[:6] == list(b"first\n")


def test_prepare_streams_large_files(tmp_path: Path) -> None:
    content = ("zeile äöü €\n" * 20_000 + "x" * 3_000_000 + "\nend").encode()
    (tmp_path / "big.txt").write_bytes(content)
    prepare([tmp_path / "big.txt"], tmp_path / "big")
    written = np.fromfile(tmp_path / "big.bin", dtype="<u2")
    assert written.tolist() == [*content, 256]


def test_plain_token_file_without_description(tmp_path: Path) -> None:
    np.arange(11, dtype="<u2").tofile(tmp_path / "t.bin")
    source = TokenFile(tmp_path / "t.bin", 5)
    assert len(source) == 2
    assert source[1]["input_ids"].tolist() == [5, 6, 7, 8, 9]
    assert source.vocab_size is None
    np.arange(11, dtype="<u4").tofile(tmp_path / "w.bin")
    assert TokenFile(tmp_path / "w.bin", 5, dtype="uint32")[0]["labels"].tolist() == [1, 2, 3, 4, 5]


def test_python_docs_need_no_file() -> None:
    text = Text("python-docs", 128)
    assert len(text) > 1000
    assert text.identity() == Text("python-docs", 128).identity()
    assert "python-docs" in text.whereabouts(3)
    tokens = tokens_of(Text("python-docs", 4096))
    assert bytes(token for token in tokens[:8192] if token < 256).decode("utf-8", "ignore").isprintable() is False
    assert 256 in tokens


def test_identity_notices_names_and_sizes_but_not_the_place(folder: Path, tmp_path: Path) -> None:
    before = Text(folder, 5).identity()
    assert set(before) >= {"type", "length", "fingerprint"}
    moved = tmp_path / "moved"
    folder.rename(moved)
    assert Text(moved, 5).identity() == before
    (moved / "a.txt").rename(moved / "a2.txt")
    renamed = Text(moved, 5).identity()
    assert renamed["fingerprint"] != before["fingerprint"]
    (moved / "a2.txt").write_text("first, longer\n")
    assert Text(moved, 5).identity()["fingerprint"] != renamed["fingerprint"]
    prepare([moved], tmp_path / "t")
    first = TokenFile(tmp_path / "t.bin", 5).identity()
    (moved / "a2.txt").write_text("first, langer\n")
    prepare([moved], tmp_path / "t")
    assert TokenFile(tmp_path / "t.bin", 5).identity()["fingerprint"] != first["fingerprint"]


def test_sources_work_in_workers(folder: Path, tmp_path: Path) -> None:
    prepare([folder], tmp_path / "t")
    for source in (Text(folder, 3), TokenFile(tmp_path / "t.bin", 3)):
        source[0]
        batches = []
        for num_workers in (0, 2):
            with ResumableLoader(source, global_batch_size=4, num_workers=num_workers) as loader:
                batches.append([batch["input_ids"].tolist() for step in loader.take(6) for batch in step])
                assert loader.identity() == source.identity()
        assert batches[0] == batches[1]


def test_damage_while_training_names_file_and_offset(tmp_path: Path) -> None:
    np.arange(100, dtype="<u2").tofile(tmp_path / "t.bin")
    loader = ResumableLoader(TokenFile(tmp_path / "t.bin", 10), global_batch_size=1, shuffle=False)
    loader.seek(5)
    os.truncate(tmp_path / "t.bin", 60)
    with pytest.raises(DataError, match=r"sample 5 \(.*t\.bin at byte 100\), stream position 5: .*t\.bin: ends before"):
        next(loader.take())


@pytest.mark.parametrize("block", [0, 1, 2, 3])
def test_bad_utf8_is_named_with_its_place(tmp_path: Path, block: int) -> None:
    good = b"a" * ((1 << 20) - block) + "€".encode()
    (tmp_path / "good.txt").write_bytes(good)
    assert len(Text(tmp_path / "good.txt", 1000)) > 1000
    (tmp_path / "bad.txt").write_bytes(good + b"\xff tail")
    with pytest.raises(DataError, match=rf"bad\.txt: not UTF-8 at byte {len(good)}"):
        Text(tmp_path / "bad.txt", 4)
    (tmp_path / "cut.txt").write_bytes(good[:-1])
    with pytest.raises(DataError, match=rf"cut\.txt: not UTF-8 at byte {len(good) - 3}"):
        Text(tmp_path / "cut.txt", 4)
    with pytest.raises(DataError, match=r"bad\.txt: not UTF-8"):
        prepare([tmp_path / "bad.txt"], tmp_path / "out")
    assert not list(tmp_path.glob("*out*")) + list(tmp_path.glob(".*out*"))


def test_unusable_files_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("abc")
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "hollow").mkdir()
    cases: list[tuple[Any, str]] = [
        (lambda: Text(tmp_path / "none.txt", 4), "none.txt: No such file"),
        (lambda: Text(tmp_path / "empty.txt", 4), "empty.txt: there is no text"),
        (lambda: Text(tmp_path / "short.txt", 4), r"short.txt has 4 tokens, .* = 5"),
        (lambda: Text(tmp_path / "hollow", 4), "hollow: the folder holds no file"),
        (lambda: TokenFile(tmp_path / "none.bin", 4), "none.bin: No such file"),
        (lambda: TokenFile(tmp_path / "empty.txt", 4), "empty.txt: the file is empty"),
        (lambda: TokenFile(tmp_path / "odd.bin", 4), "odd.bin: 3 bytes are no whole number"),
        (lambda: TokenFile(tmp_path / "hollow", 4), "hollow: a token file was expected"),
        (lambda: prepare([tmp_path / "none"], tmp_path / "o"), "none: No such file"),
        (lambda: prepare([], tmp_path / "o"), "no input file"),
    ]
    for call, words in cases:
        with pytest.raises(DataError, match=words):
            call()


def test_description_and_tokens_must_agree(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text that is long enough")
    prepare([tmp_path / "a.txt"], tmp_path / "t")
    with pytest.raises(UsageError, match="says uint16, but dtype is uint32"):
        TokenFile(tmp_path / "t.bin", 4, dtype="uint32")
    with pytest.raises(UsageError, match="dtype must be one of"):
        TokenFile(tmp_path / "t.bin", 4, dtype="int8")
    with (tmp_path / "t.bin").open("ab") as stream:
        stream.write(b"xx")
    with pytest.raises(DataError, match=r"holds 31 tokens, but .*t\.bin\.json says 30"):
        TokenFile(tmp_path / "t.bin", 4)
    (tmp_path / "t.bin.json").write_text(json.dumps({"format": "other"}))
    with pytest.raises(DataError, match=r"t\.bin\.json: cannot be read"):
        TokenFile(tmp_path / "t.bin", 4)


def test_registry_builds_and_refuses(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    assert len(build_source("Text", {"path": str(tmp_path / "a.txt"), "seq_length": 4})) == 2
    assert isinstance(build_source("perdure.data.sources.text:Text", {"path": "python-docs", "seq_length": 64}), Text)
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("Text", {"path": "x", "seq_lenght": 4}, "seq_lenght: unknown key of Text; did you mean seq_length?"),
        ("Text", {"path": "x"}, "seq_length: Text needs this key"),
        ("Txt", {}, "did you mean Text?"),
        ("Text", {"path": "python-docs", "seq_length": 0}, "seq_length: seq_length must be a positive"),
        ("no_such_package:Thing", {}, "cannot be imported"),
        ("perdure.data.order:Nothing", {}, "cannot be imported"),
        ("perdure.data.order:SMALL", {}, "not something that can be called"),
    ]
    for kind, keys, words in cases:
        with pytest.raises(ConfigError) as caught:
            build_source(kind, keys)
        assert words in caught.value.message


def test_registry_uses_the_given_fault() -> None:
    class Placed(ConfigError):
        pass

    with pytest.raises(Placed, match=r"run\.yaml:3:1: path"):
        build_source("Text", {"seq_length": 3}, fault=lambda key, text: Placed(f"run.yaml:3:1: {key}: {text}"))


def test_missing_tokenizers_package_or_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(PerdureError, match="tokenizer"):
        prepare([tmp_path / "a.txt"], tmp_path / "t", tokenizer=str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="No such file"):
        prepare([tmp_path / "a.txt"], tmp_path / "t", tokenizer=str(tmp_path / "none.json"))
    with pytest.raises(UsageError, match="separator"):
        prepare([tmp_path / "a.txt"], tmp_path / "t", separator="</s>")
