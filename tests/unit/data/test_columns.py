"""`column_names` chooses what the model is given, of any data whose samples are mappings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from perdure.config.load import load_config_mapping
from perdure.data.columns import Columns
from perdure.data.loader import ResumableLoader
from perdure.errors import ConfigError
from perdure.train import build


def config(path: Path, **dataloader: Any) -> Any:
    source = {"type": "Text", "path": str(path), "seq_length": 4, **dataloader}
    return load_config_mapping(
        {
            "lr_scheduler": {"type": "ConstantWarmUpLR"},
            "train_dataset": {"dataloader": source},
            "eval_dataset": {"dataloader": source},
        }
    )


def test_columns_are_chosen_and_the_rest_stays(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("some text to train on")
    whole = build.data(config(text), None)
    chosen = build.data(config(text, column_names=["labels"]), None)
    assert list(chosen[1]) == ["labels"]
    assert list(whole[1]) == ["input_ids", "labels"]
    assert chosen[1]["labels"].equal(whole[1]["labels"])
    assert list(build.evaluation_data(config(text, column_names=["labels"]), None)[0]) == ["labels"]
    assert chosen.vocab_size == whole.vocab_size == 257
    assert chosen.whereabouts(1) == whole.whereabouts(1)
    assert (
        ResumableLoader(chosen, global_batch_size=1).identity()
        == ResumableLoader(whole, global_batch_size=1).identity()
    )
    passed = build.data(config(text, column_names=["n"]), [{"n": 1, "x": 2}])
    assert passed[0] == {"n": 1}
    assert not hasattr(passed, "stream_order")
    assert isinstance(passed, Columns)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (None, r"column_names: samples have no column 'position_ids', only input_ids, labels"),
        ([(1, 2)], "column_names: samples are tuple, not mappings of columns"),
        (iter([{"a": 1}]), "column_names: data that can only be read in a row"),
    ],
)
def test_what_has_no_such_columns_is_refused_by_name(tmp_path: Path, given: Any, words: str) -> None:
    text = tmp_path / "a.txt"
    text.write_text("some text to train on")
    with pytest.raises(ConfigError, match=words):
        build.data(config(text, column_names=["input_ids", "position_ids"]), given)
