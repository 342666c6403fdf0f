"""What an unknown key was probably meant to be: a key that belongs elsewhere, an older name, the nearest key."""

from __future__ import annotations

import difflib
from dataclasses import replace

from perdure.config.base import Section, section_class
from perdure.config.faults import Fault, Path, key_text

__all__ = ["known_keys", "with_suggestion"]

# What other programs call it.
_OTHER_NAMES = {
    "clip_grad": "training.max_norm",
    "eval_interval": "training.eval_interleaved_steps",
    "eval_steps": "training.eval_interleaved_steps",
    "keep_checkpoint_max": "checkpoint.save_max",
    "load_checkpoint": "checkpoint.load_path",
    "lr": "lr_scheduler.learning_rate",
    "max_grad_norm": "training.max_norm",
    "max_steps": "training.steps",
    "micro_batch_size": "training.local_batch_size",
    "num_steps": "training.steps",
    "num_workers": "train_dataset.num_parallel_workers",
    "per_device_train_batch_size": "training.local_batch_size",
    "resume_from_checkpoint": "checkpoint.load_path",
    "resume_training": "checkpoint.auto_resume",
    "save_checkpoint_steps": "checkpoint.save_interleaved_steps",
    "save_interval": "checkpoint.save_interleaved_steps",
    "save_steps": "checkpoint.save_interleaved_steps",
    "save_total_limit": "checkpoint.save_max",
    "train_iters": "training.steps",
}
_LENGTH = "a run is as long as training.steps says"
_ACCUMULATION = "it follows from training.global_batch_size, local_batch_size and the number of ranks"
_NO_KEYS = {
    "accumulate_grad_batches": _ACCUMULATION,
    "epochs": _LENGTH,
    "gradient_accumulation_steps": _ACCUMULATION,
    "max_epochs": _LENGTH,
    "num_epochs": _LENGTH,
    "num_train_epochs": _LENGTH,
}


def known_keys(root: type[Section]) -> list[Path]:
    """The paths of all keys below `root`, sections included."""
    paths: list[Path] = []
    for name, field in root.model_fields.items():
        paths.append((name,))
        nested = section_class(field.annotation)
        if nested is not None and not str(field.annotation).startswith("list"):
            paths += [(name, *path) for path in known_keys(nested)]
    return paths


def with_suggestion(fault: Fault, root: type[Section]) -> Fault:
    """The fault, with the place where an unknown key belongs where that is elsewhere in `root`."""
    name = fault.path[-1] if fault.path else None
    if not fault.text.startswith("unknown key") or "belongs to" in fault.text or not isinstance(name, str):
        return fault
    keys = [path for path in known_keys(root) if path[-1] != "type"]
    same = [path for path in keys if path[-1] == name]
    if same:
        nearest = min(same, key=lambda path: (-_shared(path, fault.path), len(path)))
        return replace(fault, text=f"unknown key; it belongs to {key_text(nearest)}")
    if name in _OTHER_NAMES:
        return replace(fault, text=f"unknown key; it is called {_OTHER_NAMES[name]}")
    if name in _NO_KEYS:
        return replace(fault, text=f"unknown key; {_NO_KEYS[name]}")
    near = difflib.get_close_matches(name, [str(path[-1]) for path in keys], n=1, cutoff=0.75)
    if "did you mean" in fault.text or not near:
        return fault
    nearest = next(path for path in keys if path[-1] == near[0])
    return replace(fault, text=f"{fault.text.partition(';')[0]}; did you mean {key_text(nearest)}?")


def _shared(one: Path, other: Path) -> int:
    return next(
        (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
