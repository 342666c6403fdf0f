"""One rank reads for its group: the others get the same batches in every bit, and its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CHECK = r"""
import json, os, sys
import numpy as np
import torch
import torch.distributed as dist
from perdure.data.loader import ResumableLoader
from perdure.data.group_reading import SharedLoader
from perdure.errors import DataError, UsageError

class Samples:
    reads = 0
    def __len__(self):
        return 50
    def __getitem__(self, index):
        type(self).reads += 1
        if index == 49:
            raise OSError(f"no such shard on rank {dist.get_rank()}")
        return {"x": torch.rand(3) + index, "n": index}

def collate(samples):
    x = torch.stack([sample["x"] for sample in samples])
    return {
        "x": x, "half": x.to(torch.bfloat16), "flags": x > 5, "empty": torch.empty(0, 2), "scalar": torch.tensor(7),
        "array": np.arange(3.0), "turned": x.T, "rest": [1, "text", (None, 2.5, True)],
    }

def shown(value):
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape), value.float().tolist()]
    if isinstance(value, np.ndarray):
        return ["array", value.tolist()]
    if isinstance(value, dict):
        return {key: shown(each) for key, each in value.items()}
    return [type(value).__name__, [shown(each) for each in value]] if isinstance(value, (list, tuple)) else repr(value)

def loader(collate_fn=collate, dataset=Samples(), **settings):
    inner = ResumableLoader(
        dataset, global_batch_size=4, local_batch_size=2, seed=3, rank=0, ranks=1, shuffle=False,
        collate_fn=collate_fn, **settings,
    )
    return SharedLoader(inner, group, [0, 1])

dist.init_process_group("gloo")
group = dist.new_group([0, 1], backend="gloo")
told = {"rank": dist.get_rank()}
with loader() as shared:
    shared.seek(6)
    steps = list(shared.take(3))
    shared.leave_out([(20, 24)])
    steps += list(shared.take(2))
told["steps"] = [
    [step.first, step.last, [[m.first, m.ids, list(m.positions), shown(m.data)] for m in step.micro_batches]]
    for step in steps
]
told["reads"] = Samples.reads
with loader(num_workers=1) as shared:
    shared.seek(44)
    next(shared.take())
    try:
        next(shared.take())
    except DataError as error:
        told["error"] = str(error)
def interrupted(samples):
    raise KeyboardInterrupt("stop\ud800")

class Unordered(Samples):
    def stream_order(self, seed, shuffle):
        return self
    def gather(self, runs):
        raise OSError("no table of the order")

def refusal(make):
    try:
        next(make().take())
    except BaseException as error:
        return [type(error).__name__, getattr(error, "message", str(error)).encode("utf-8", "replace").decode()]

unsendable = [object(), 2**70, "\ud800", torch.eye(2).to_sparse(), np.array([{}]), {(1, 2): 3}]
told["unsendable"] = [refusal(lambda: loader(collate_fn=lambda samples: each)) for each in unsendable]
told["interrupted"] = refusal(lambda: loader(collate_fn=interrupted))
told["unordered"] = refusal(lambda: loader(dataset=Unordered()))
told["then"] = [micro.ids for micro in next(loader().take()).micro_batches]
print(json.dumps(told), file=open(os.path.join(sys.argv[1], f"{dist.get_rank()}.json"), "w"))
dist.barrier()
dist.destroy_process_group()
"""


def test_identical_batches_and_errors_from_one_reader(tmp_path: Path) -> None:
    script = tmp_path / "check.py"
    script.write_text(CHECK)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    assert first["steps"] == second["steps"]
    assert [step[:2] for step in first["steps"]] == [[6, 10], [10, 14], [14, 18], [18, 26], [26, 30]]
    data = first["steps"][0][2][0][3]
    assert data["half"][0] == "torch.bfloat16"
    assert data["rest"] == ["list", ["1", "'text'", ["tuple", ["None", "2.5", "True"]]]]
    assert data["empty"][1] == [0, 2]
    assert first["reads"] >= 20
    assert second["reads"] == 0
    assert "sample 49, stream position 49: OSError: no such shard on rank 0" in first["error"]
    assert second["error"].startswith("rank 0: ")
    assert "no such shard on rank 0" in second["error"]
    reasons = ["holds a object", "ints < -2", "surrogates", "layout torch.sparse", "ndarray of object", "holds a dict"]
    for told in (first, second):
        for (kind, message), reason in zip(told["unsendable"], reasons, strict=True):
            assert kind == "UsageError"
            assert reason in message
    # Whatever the reader meets, the others are told instead of left waiting, and all can go on.
    assert first["interrupted"][0] == "KeyboardInterrupt"
    assert second["interrupted"] == ["DataError", "rank 0: KeyboardInterrupt: stop\\ud800"]
    assert first["unordered"] == ["OSError", "no table of the order"]
    assert second["unordered"] == ["DataError", "rank 0: OSError: no table of the order"]
    assert first["then"] == second["then"] == [[0, 1], [2, 3]]
