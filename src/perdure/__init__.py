"""Step-exact resumable training for PyTorch.

The public names are resolved on first use (PEP 562): `import perdure` itself imports neither torch
nor numpy, so that the commands that only read checkpoints start at once.

| name | what for |
| --- | --- |
| `Trainer`, `TrainConfig` | train from one YAML file |
| `Checkpointer`, `CheckpointConfig`, `Progress` | save and resume a loop of one's own |
| `ResumableLoader` | data that go on at the exact sample |
| `Stateful`, `RandomState` | further objects to save along |
| `Callback` | hooks of the trainer |
| `Checkpoint`, `CommonInfo`, `verify` | read and check what is on disk |
| `PerdureError` | the base of every error raised on purpose |
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perdure.catalog.checkpoint import Checkpoint
    from perdure.catalog.verify import verify
    from perdure.config.schema import CheckpointConfig, TrainConfig
    from perdure.data.loader import ResumableLoader
    from perdure.engine.checkpointer import Checkpointer
    from perdure.engine.progress import Progress
    from perdure.errors import PerdureError
    from perdure.format.common import CommonInfo
    from perdure.state.random import RandomState
    from perdure.state.stateful import Stateful
    from perdure.train.callbacks.base import Callback
    from perdure.train.trainer import Trainer

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "Checkpoint",
    "CheckpointConfig",
    "Checkpointer",
    "CommonInfo",
    "PerdureError",
    "Progress",
    "RandomState",
    "ResumableLoader",
    "Stateful",
    "TrainConfig",
    "Trainer",
    "__version__",
    "verify",
]

_HOMES = {
    "Callback": "perdure.train.callbacks.base",
    "Checkpoint": "perdure.catalog.checkpoint",
    "CheckpointConfig": "perdure.config.schema",
    "Checkpointer": "perdure.engine.checkpointer",
    "CommonInfo": "perdure.format.common",
    "PerdureError": "perdure.errors",
    "Progress": "perdure.engine.progress",
    "RandomState": "perdure.state.random",
    "ResumableLoader": "perdure.data.loader",
    "Stateful": "perdure.state.stateful",
    "TrainConfig": "perdure.config.schema",
    "Trainer": "perdure.train.trainer",
    "verify": "perdure.catalog.verify",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
