"""Every layout saved and loaded in every other: the same bits, the same next step, each byte written once.

To try another layout, add a line to LAYOUTS.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from perdure import Callback, CheckpointConfig, Checkpointer, Progress, Trainer
from perdure.catalog.checkpoint import Checkpoint
from perdure.catalog.fingerprint import fingerprint, total
from perdure.config.load import load_config_mapping
from perdure.engine import destinations
from perdure.errors import MismatchError
from perdure.format.digest import digest_bytes
from perdure.format.dtypes import BY_SAFETENSORS
from perdure.format.safetensors import header_length
from perdure.state.model import model_tensors
from perdure.train.history import read_lines, superseded

from . import forked

TENSOR = {"tensor_parallel": 2, "sequence_parallel": True}
PIPELINE = {"pipeline_parallel": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "replicate 2": (2, {"data_parallel_replicate": 2}),
    "shard 3": (3, {}),
    "replicate 2 x shard 2": (4, {"data_parallel_replicate": 2}),
    "tensor 2": (2, TENSOR),
    "shard 2 x tensor 2": (4, TENSOR),
    "pipeline 2 x shard 2": (4, PIPELINE),
    "shard 2": (2, {}),
    "shard 4": (4, {}),
    "pipeline 2": (2, PIPELINE),
    "chunks 2": (2, {**PIPELINE, "pipeline_parallel_interleave_num": 2}),
    "pipeline 2 x tensor 2": (4, {**PIPELINE, **TENSOR}),
}
FIRST = list(LAYOUTS)[:7]
"""Those that a plain run tries; all of them are for the slow one."""

STEP = 2


def configuration(output: Path, steps: int, low: bool, layout: dict[str, Any], **keys: Any) -> dict[str, Any]:
    """A decoder so narrow that some of its norms are empty on a third rank."""
    return {
        "training": {"steps": steps, "local_batch_size": 1, "global_batch_size": 12, "seed": 42},
        "model": {
            "type": "decoder",
            "hidden_size": 4,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "intermediate_size": 10,
            "params_dtype": "bfloat16" if low else "float32",
        },
        "lr_scheduler": {"type": "ConstantWarmUpLR", "learning_rate": 1e-3},
        "train_dataset": {
            "num_parallel_workers": 0,
            "dataloader": {"type": "Text", "path": "python-docs", "seq_length": 16, "shuffle": True},
        },
        "parallelism": layout,
        "checkpoint": {"save_interleaved_steps": 1, **keys},
        "output_dir": str(output),
    }


class Pairs(Callback):
    """On a trainer that is built, loads each checkpoint in turn, notes what came of it, and saves the last again."""

    def __init__(self, sources: list[Path], target: Path) -> None:
        self.sources, self.target = sources, target

    def on_build(self, trainer: Any, state: Any) -> None:
        ranks = trainer.ranks
        found = []
        for number, source in enumerate(self.sources):
            config = CheckpointConfig(
                load_path=str(source),
                save_path=str(self.target),
                enable_save=number == len(self.sources) - 1,
                verify_on_load="first" if number == 0 else "inline",
                load_balanced=number % 2 == 1,
            )
            with Checkpointer(
                config,
                model=trainer.model,
                optimizer=trainer.optimizer,
                training=lambda: trainer._training_record(),
                restore_settings=False,
                ranks=ranks,
                say=lambda line: None,
            ) as checkpointer:
                progress = checkpointer.load()
                assert progress.global_step == STEP
                assert checkpointer.loaded is not None
                found.append(
                    {
                        "digest": digest(trainer),
                        "read": checkpointer.loaded.bytes_read,
                        "held": held(trainer),
                        "notes": checkpointer.loaded.notes,
                    }
                )
                checkpointer.save(Progress(STEP, progress.consumed_samples, 12), wait=True)
        self.target.with_suffix(f".rank-{ranks.rank}").write_text(json.dumps(found))


def state(trainer: Any) -> list[tuple[str, torch.Tensor]]:
    """What this rank holds of the model and its optimizer."""
    found = [(t.name, p.tensor) for t in model_tensors(trainer.model) for p in t.pieces]
    for section in trainer.checkpointer._live.collect(trainer.ranks, with_optimizer=True)[1]:
        found += [(f"{section.section} {section.name}", p.tensor) for p in section.pieces]
    return found


def digest(trainer: Any) -> str:
    parts = [f"{name} {t.dtype} {tuple(t.shape)} {t.float().flatten().tolist()}" for name, t in state(trainer)]
    return digest_bytes("\n".join(sorted(parts)).encode())


def held(trainer: Any) -> int:
    tensors = trainer.checkpointer._live.collect(trainer.ranks, with_optimizer=True)[1]
    return sum(p.tensor.numel() * p.tensor.element_size() for t in tensors for p in t.pieces)


def train(folder: Path, name: str, configured: dict[str, Any], *callbacks: Callback, load: Path | None = None) -> None:
    ranks = LAYOUTS[name][0]

    def work(rank: int) -> None:
        Trainer(load_config_mapping(configured), callbacks=callbacks).train(None if load is None else str(load))

    assert forked.job(folder / "job", ranks, work) == [0] * ranks, forked.told(folder / "job")


def lines(output: Path, step: int) -> tuple[Any, ...]:
    """Loss, norm, samples and ids of one step."""
    (figures,) = [x for x in superseded(read_lines(str(output / "metrics.jsonl"))) if x.get("step") == step]
    (ids,) = [x["ids"] for x in superseded(read_lines(str(output / "ledger.jsonl"))) if x["step"] == step]
    return figures["loss"], figures["grad_norm"], figures["samples"], ids


def check_written(root: Path, ranks: int) -> None:
    """Each byte once over all ranks, replicas evenly."""
    checkpoint = Checkpoint(root)
    wanted = sum(record.nbytes for _, _, record in checkpoint.metadata.tensors())
    largest = max(
        BY_SAFETENSORS[r.dtype].itemsize * s.box.numel for _, _, r in checkpoint.metadata.tensors() for s in r.shards
    )
    written = [0] * ranks
    for path in Path(checkpoint.path).glob("*.safetensors"):
        rank = int(path.stem.split("-")[-2])
        written[rank] += path.stat().st_size - header_length(path.read_bytes()[:8], 1 << 40, path.name)
    assert sum(written) == wanted
    if root.name.startswith("replicate 2") and ranks == 2:
        assert max(written) - min(written) <= largest


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("names", "low"),
    [
        (FIRST, False),
        (["one", "shard 3", "shard 2 x tensor 2"], True),
        pytest.param(list(LAYOUTS), False, marks=pytest.mark.slow),
        pytest.param(["tensor 2", "pipeline 2 x tensor 2", "shard 4"], True, marks=pytest.mark.slow),
    ],
    ids=["float32", "bfloat16 with masters", "all float32", "more bfloat16 with masters"],
)
def test_any_layout_into_any_other(tmp_path: Path, names: list[str], low: bool) -> None:
    straight = tmp_path / "straight"
    train(tmp_path, "one", configuration(straight, STEP + 1, low, {}))
    first = tmp_path / "first"
    shutil.copytree(straight / "checkpoint" / f"iteration_{STEP:08d}", first / f"iteration_{STEP:08d}")
    wanted = fingerprint(first)
    roots = {name: tmp_path / "saved" / name for name in names}
    (tmp_path / "saved").mkdir()
    for name in names:
        ranks, layout = LAYOUTS[name]
        configured = configuration(tmp_path / f"first-{name}", STEP, low, layout, enable_save=False)
        train(tmp_path, name, configured, Pairs([first], roots[name]), load=first)
        assert fingerprint(roots[name]) == wanted, name
        check_written(roots[name], ranks)
    (tmp_path / "again").mkdir()
    for number, name in enumerate(names):
        ranks, layout = LAYOUTS[name]
        again, output = tmp_path / "again" / name, tmp_path / f"second-{name}"
        # The layout itself comes last and is saved again; the run goes on from its neighbour's checkpoint.
        sources = [roots[other] for other in [*names[number + 1 :], *names[: number + 1]]]
        configured = configuration(output, STEP + 1, low, layout, enable_save=False)
        train(tmp_path, name, configured, Pairs(sources, again), load=sources[0])
        assert total(fingerprint(again).values()) == total(wanted.values())
        for rank in range(ranks):
            found = json.loads(again.with_suffix(f".rank-{rank}").read_text())
            assert len({each["digest"] for each in found}) == 1, name
            # Cut anew by this layout, the first load was compared with what was saved.
            if name == "shard 3":
                assert any(note.startswith("fingerprint of") for note in found[0]["notes"])
            # What was saved on the same layout is read once by each rank, and nothing else.
            if ranks > 1 and "data_parallel_replicate" not in layout and "tensor_parallel" not in layout:
                assert found[-1]["read"] <= found[-1]["held"]
        loss, norm, samples, ids = lines(output, STEP + 1)
        expected_loss, expected_norm, *expected = lines(straight, STEP + 1)
        assert [samples, ids] == expected
        assert loss == pytest.approx(expected_loss, abs=2e-3 if low else 1e-6)
        assert norm == pytest.approx(expected_norm, rel=2e-2 if low else 1e-5)


def test_a_load_that_goes_wrong_on_one_rank_is_found_by_the_fingerprint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of one rank that swaps two elements: digests of what was read cannot see it."""
    straight = tmp_path / "straight"
    train(tmp_path, "one", configuration(straight, STEP, False, {}))
    plain = destinations.copy_overlap

    def work(rank: int) -> None:
        if rank == 1:
            from perdure.engine import reader

            def swapping(values: Any, box: Any, piece: Any) -> None:
                plain(values, box, piece)
                if piece.tensor.numel() > 3 and piece.tensor.dim() == 2:
                    rows = piece.tensor.clone()
                    piece.tensor[0], piece.tensor[-1] = rows[-1], rows[0]

            reader.copy_overlap = swapping  # type: ignore[attr-defined]
        keys = {"verify_on_load": "first", "enable_save": False}
        configured = configuration(tmp_path / "two", STEP + 1, False, {}, **keys)
        with pytest.raises(MismatchError, match="are not in memory what they are in the checkpoint, first"):
            Trainer(load_config_mapping(configured)).train(str(straight / "checkpoint"))

    assert forked.job(tmp_path / "job", 2, work) == [0, 0], forked.told(tmp_path / "job")
