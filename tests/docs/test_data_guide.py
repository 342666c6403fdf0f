"""The guide to data: its commands work, its sections train, and the audit says what it shows."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from pydoc_data import topics

import pytest
from ruamel.yaml import YAML

from perdure import Trainer
from perdure.cli.main import run
from perdure.data.sources.registry import SOURCES

GUIDE = (Path(__file__).parents[2] / "docs/guides/data.md").read_text(encoding="utf-8")


def commands() -> list[list[str]]:
    return [shlex.split(line)[2:] for line in GUIDE.splitlines() if line.startswith("$ perdure ")]


def test_the_guide_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = [topics.topics[name] for name in sorted(topics.topics)[:8]]
    Path("corpus.txt").write_text("\n".join(texts[:4]), encoding="utf-8")
    Path("more.txt").write_text("\n".join(texts[4:]), encoding="utf-8")
    prepare, audit = commands()
    assert run(prepare) == 0
    sections = [YAML(typ="safe").load(shown) for shown in re.findall(r"```yaml\n(.*?)```", GUIDE, re.S)]
    outputs = ["text", "tokens", "output", "output"]
    for number, (section, output) in enumerate(zip(sections, outputs, strict=True)):
        section["train_dataset"]["num_parallel_workers"] = 0
        Trainer(
            {
                "training": {"steps": 10 if number < 3 else 20, "local_batch_size": 8, "global_batch_size": 8},
                "model": {"type": "decoder", "vocab_size": 257, "hidden_size": 8, "num_hidden_layers": 1}
                | {"num_attention_heads": 1, "intermediate_size": 8},
                "lr_scheduler": {"type": "ConstantWarmUpLR"},
                "checkpoint": {"auto_resume": True},
                "output_dir": output,
                **section,
            }
        ).train()
    capsys.readouterr()
    assert run(audit) == 0
    shown = next(line for line in GUIDE.splitlines() if line.startswith("every sample exactly once"))
    assert capsys.readouterr().out.startswith(shown.removesuffix(" ..."))


def test_every_source_and_key_that_the_guide_names_is_there() -> None:
    table = GUIDE[GUIDE.index("| `type` |") : GUIDE.index("Any map-style data set")]
    named = set(re.findall(r"`([A-Z]\w+)`", table))
    assert named == set(SOURCES) - {"BlendedMegatronDatasetDataLoader", "HFDataLoader"}
