"""A run small enough to be killed a thousand times: real model, optimizer and registered object, no loop of its own.

What it has done is a word: one letter per update, which the letter and the place decide in every bit. The
checkpoint carries the word, so that whatever is loaded says which truth it claims to be, and can be compared.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from perdure import CheckpointConfig, Checkpointer, Progress
from perdure.catalog.events import append_event
from perdure.catalog.publish import set_tracker
from perdure.catalog.root import Root
from perdure.format.metadata import CheckpointMetadata
from perdure.storage.base import Storage

__all__ = ["Run", "content", "go_back", "rewind", "train"]


class Word:
    """What was done, and a tensor that follows from it."""

    def __init__(self) -> None:
        self.text, self.mean = "", torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"text": self.text, "mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.text, self.mean = state["text"], state["mean"]


class Run:
    """The live objects; as they are built, nothing was done yet.

    Args:
        frozen: half of the weights are never trained.
    """

    def __init__(self, frozen: bool = False) -> None:
        torch.manual_seed(1)
        self.model = nn.Linear(3, 5)
        self.model.bias.requires_grad_(not frozen)
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=0.1)
        self.word = Word()

    @classmethod
    def after(cls, text: str, frozen: bool = False) -> Run:
        """The state that a run without any interruption has after these updates."""
        run = cls(frozen)
        for letter in text:
            run.update(letter)
        return run

    def update(self, letter: str) -> None:
        """One update; gradients are drawn, so that no thread of autograd's is ever started before a fork."""
        generator = torch.Generator().manual_seed(1000 * len(self.word.text) + ord(letter))
        for parameter in self.model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = gradient if parameter.requires_grad else None
        self.optimizer.step()
        self.word.text += letter
        self.word.mean = self.word.mean * 0.5 + self.model.bias.detach()[:3]

    def digest(self) -> str:
        """Over every bit of it."""
        hasher = hashlib.sha256()
        moments = [v for state in self.optimizer.state.values() for _, v in sorted(state.items())]
        for tensor in map(self.whole, (*self.model.state_dict().values(), *moments, self.word.mean)):
            hasher.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
        return hasher.hexdigest()

    def whole(self, value: torch.Tensor) -> torch.Tensor:
        """All of a tensor, of which this rank may hold a part."""
        return value

    def checkpointer(self, path: str, storage: Storage | None, background: bool, save_max: int) -> Checkpointer:
        """As `auto_resume` starts it, time after time."""
        config = CheckpointConfig(
            save_path=path, auto_resume=True, save_interleaved_steps=1, save_max=save_max, async_save=background
        )
        return Checkpointer(
            config,
            model=self.model,
            optimizer=self.optimizer,
            extra={"word": self.word},
            storage=storage,
            say=lambda line: None,
        )


def train(
    path: str,
    to: str,
    *,
    storage: Storage | None = None,
    background: bool = False,
    save_max: int = 9,
    numbered: Callable[[str], int] = len,
    frozen: bool = False,
) -> None:
    """Resumes, and goes on to the word `to`, saving after each update.

    Args:
        numbered: the step number of a word.
        frozen: half of the weights are never trained.

    Raises:
        AssertionError: what was resumed is of another branch.
    """
    run = Run(frozen)
    with run.checkpointer(path, storage, background, save_max) as checkpointer:
        progress = checkpointer.load()
        done = run.word.text
        assert to.startswith(done), f"resumed {done!r}, which does not lead to {to!r}"
        assert progress.consumed_samples == 4 * len(done), f"{progress.consumed_samples} samples with {done!r}"
        for letter in to[len(done) :]:
            run.update(letter)
            text = run.word.text
            checkpointer.save(Progress(numbered(text), 4 * len(text), 4))


def go_back(path: str, position: int, *, storage: Storage | None = None, background: bool = False) -> None:
    """Resumes; where that is past a position in the samples, goes back by itself to a checkpoint from before."""
    run = Run()
    with run.checkpointer(path, storage, background, 9) as checkpointer:
        if checkpointer.load().consumed_samples > position:
            progress = checkpointer.go_back(position)
            assert progress is not None
            assert run.digest() == Run.after("A" * (position // 4)).digest()


def rewind(path: str, iteration: int, storage: Storage | None = None) -> None:
    """What `perdure rewind` does below its lock."""
    root = Root(path, storage)
    set_tracker(root, iteration)
    append_event(root, "rewind", to=iteration)


def content(path: str) -> list[str]:
    """What a root holds, a line each, without what differs from try to try: every tensor's digest, the words."""
    root = Root(path)
    found = [f"tracker {root.tracker().text}"]
    for iteration in root.iterations():
        metadata = CheckpointMetadata.decode(Path(iteration.path, "metadata.json").read_bytes())
        assert metadata.model
        assert metadata.optimizer
        tensors = [(s, n, [x.digest for x in t.shards]) for s, n, t in metadata.tensors()]
        extra = msgspec.json.encode(metadata.training["extra"]).decode()
        found.append(f"{iteration.dirname}: {iteration.commit.consumed_samples} {extra} {tensors}")
    return found + sorted(n for n in os.listdir(path) if n not in ("lock", "events.jsonl"))
