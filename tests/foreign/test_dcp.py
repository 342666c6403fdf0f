"""torch.distributed.checkpoint: what two ranks wrote comes in whole, and registered objects go out and come back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tests.foreign.ours import perdure
from tests.foreign.toy import equal, load, optimizer_of
from torch import Tensor, nn

from perdure.catalog.diff import diff
from perdure.catalog.fingerprint import fingerprint
from perdure.cli.main import run
from perdure.config.schema import CheckpointConfig
from perdure.engine.checkpointer import Checkpointer
from perdure.engine.progress import Progress
from perdure.models.decoder import Decoder

# What torch says of any save by one process.
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

TWO_RANKS = """
import sys, torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from perdure.models.decoder import Decoder

dist.init_process_group("gloo")
torch.manual_seed(3)
model = Decoder(vocab_size=65, hidden_size=36, num_hidden_layers=1, num_attention_heads=2)
mesh = init_device_mesh("cpu", (2,))
for block in model.layers.values():
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
for _ in range(2):
    model(torch.arange(6).reshape(1, 6)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
weights, states = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optimizer": states, "note": ["kept", 3]}, checkpoint_id=sys.argv[1])
weights, states = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
if dist.get_rank() == 0:
    torch.save({"model": weights, "optimizer": states}, sys.argv[2])
dist.barrier()
dist.destroy_process_group()
"""


def test_what_two_ranks_wrote_comes_in_whole(tmp_path: Path) -> None:
    (tmp_path / "two.py").write_text(TWO_RANKS)
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(tmp_path / "two.py")]
    done = subprocess.run([*words, str(tmp_path / "dcp"), str(tmp_path / "full.pt")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) == 2
    perdure("import", "--from", "torch-dcp", tmp_path / "dcp", tmp_path / "root", "--step", 2, "--global-batch-size", 3)
    full = torch.load(tmp_path / "full.pt", weights_only=True)
    model = Decoder(vocab_size=65, hidden_size=36, num_hidden_layers=1, num_attention_heads=2)
    optimizer = optimizer_of(model)
    progress, _, _ = load(tmp_path / "root", model, optimizer, tmp_path)
    assert (progress.global_step, progress.consumed_samples) == (2, 6)
    for name, parameter in model.named_parameters():
        assert equal(parameter, full["model"][name])
        for key, value in full["optimizer"]["state"][name].items():
            assert equal(optimizer.state[parameter][key], value)


class Average:
    """A moving average with nested state of several kinds."""

    def __init__(self, salt: float, per_rank: bool = False) -> None:
        self.per_rank = per_rank
        self.state: dict[str, Any] = {
            "shadow": {"linear.weight": torch.full((3, 2), salt), "half": torch.tensor([salt], dtype=torch.bfloat16)},
            "steps": [1, 2, (3, "four")],
            "spectrum": torch.tensor([complex(salt, -salt)]),
            "none": None,
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_registered_objects_go_out_and_come_back(tmp_path: Path) -> None:
    model, extra = nn.Linear(2, 3), {"ema": Average(0.5), "own": Average(1.5, per_rank=True)}
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    config = CheckpointConfig(save_path=str(tmp_path / "ours"))
    with Checkpointer(config, model=model, optimizer=optimizer, extra=extra, say=lambda line: None) as keeper:
        keeper.save(Progress(global_step=1, consumed_samples=4, global_batch_size=4), wait=True)
    perdure("export", tmp_path / "ours", "--to", "torch-dcp", tmp_path / "dcp")
    perdure("import", "--from", "torch-dcp", tmp_path / "dcp", tmp_path / "back")
    assert fingerprint(tmp_path / "back") == fingerprint(tmp_path / "ours")
    report = diff(tmp_path / "ours", tmp_path / "back", read_data=True)
    assert (report.tensors, report.progress, report.training) == ([], {}, {})
    found = {"ema": Average(7.0), "own": Average(7.0, per_rank=True)}
    config = CheckpointConfig(load_path=str(tmp_path / "back"), save_path=str(tmp_path / "new"))
    with Checkpointer(config, model=model, optimizer=optimizer, extra=found, say=lambda line: None) as keeper:
        keeper.load()
    for name, want in extra.items():
        state = found[name].state
        assert state["steps"] == want.state["steps"]
        assert type(state["steps"][2]) is tuple
        assert equal(state["spectrum"], want.state["spectrum"])
        assert all(equal(state["shadow"][key], tensor) for key, tensor in want.state["shadow"].items())
    tree: dict[str, Tensor] = {"extra.ema.shadow.linear.weight": torch.zeros(3, 2)}
    dcp.load(tree, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert equal(tree["extra.ema.shadow.linear.weight"], extra["ema"].state["shadow"]["linear.weight"])


def test_a_tensor_of_an_object_that_is_lost_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = '{"common": {"global_step": 1}, "training": {"extra": {"ema": {"mode": "replicated", "trees": [{"$tensor": "ema.w"}]}}}}'  # noqa: E501
    tree = {"model": {"w": torch.ones(2)}, "perdure": own, "extra": {"other": torch.ones(1)}}
    torch.save(tree, tmp_path / "x.pt")
    assert run(["import", "--from", "torch", str(tmp_path / "x.pt"), str(tmp_path / "root")]) == 1
    assert "extra: ema.w: missing" in capsys.readouterr().err


@pytest.mark.parametrize(
    "tree",
    [
        {"model": {"w": torch.ones(2)}, "scheduler": torch.optim.lr_scheduler.LambdaLR},
        {"model": {"w": torch.ones(2)}, "args": Path("x")},
        {"model": nn.Linear(2, 2)},
    ],
    ids=["a class", "a path", "a module"],
)
def test_what_needs_code_of_the_pickle_is_refused_in_words(
    tree: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(tree, tmp_path / "x.pt")
    assert run(["import", "--from", "torch", str(tmp_path / "x.pt"), str(tmp_path / "root")]) == 2
    error = capsys.readouterr().err
    assert "cannot be read without running code that lies in it" in error
    assert "hint: save plain tensors" in error
    assert not (tmp_path / "root").exists()
