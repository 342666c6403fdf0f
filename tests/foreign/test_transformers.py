"""Models and directories of the transformers library: out, in, trained, cut over ranks, resumed bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.foreign.ours import perdure, saved, trained
from tests.foreign.toy import equal, load
from torch import nn

from perdure import Checkpoint
from perdure.cli.main import run
from perdure.config.load import load_config
from perdure.errors import MismatchError
from perdure.models import build_model
from perdure.models.decoder import Decoder
from perdure.train.explain import explain
from perdure.train.trainer import Trainer

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
}  # fmt: skip
IDS = torch.arange(20).reshape(2, 10)


def model_of(**keys: Any) -> nn.Module:
    torch.manual_seed(1)
    return build_model({**LLAMA, **keys})


def logits_of(model: nn.Module) -> torch.Tensor:
    output = model.eval()(IDS)
    logits: torch.Tensor = getattr(output, "logits", output)
    return logits.detach()


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


# ---- out


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_the_decoder_exports_opens_offline_and_computes_the_same(tied: bool, dtype: str, tmp_path: Path) -> None:
    model, optimizer = trained(tied=tied)
    iteration = saved(tmp_path / "ours", model, optimizer)
    sizes = "hidden_size: 32, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, rope_theta: 500.0"
    (tmp_path / "run.yaml").write_text(
        f"model: {{type: decoder, {sizes}, tie_word_embeddings: {str(tied).lower()}}}\n"
        "lr_scheduler: {type: ConstantWarmUpLR}\n"
    )
    words = ["--config", tmp_path / "run.yaml", "--dtype", dtype, "--max-shard-size", "20KB"]
    perdure("export", iteration, "--to", "huggingface", tmp_path / "hf", *words)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", output_loading_info=True, dtype=dtype
    )
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert (theirs.lm_head.weight is theirs.model.embed_tokens.weight) == tied
    assert {p.dtype for p in theirs.parameters()} == {getattr(torch, dtype)}
    model.rope_theta = 500.0
    if dtype == "float32":
        torch.testing.assert_close(logits_of(model), logits_of(theirs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2"])
def test_what_the_trainer_made_of_theirs_opens_offline(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = "n_embd: 32, n_layer: 1, n_head: 2" if kind == "gpt2" else (
        "hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 4, num_key_value_heads: 2"
    )  # fmt: skip
    Path("run.yaml").write_text(f"""
training: {{steps: 2, local_batch_size: 1, global_batch_size: 2}}
model: {{type: transformers, model_type: {kind}, {keys}}}
lr_scheduler: {{type: ConstantWarmUpLR, learning_rate: 0.001}}
train_dataset: {{num_parallel_workers: 0, dataloader: {{type: Text, path: python-docs, seq_length: 8}}}}
""")
    trainer = Trainer("run.yaml")
    trainer.train()
    perdure("export", "output/checkpoint", "--to", "huggingface", "hf")
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained("hf", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert trainer.model is not None
    assert torch.equal(logits_of(theirs), logits_of(trainer.model))


def test_what_came_in_goes_out_with_its_own_config(tmp_path: Path) -> None:
    source = model_of(rope_parameters={"rope_type": "default", "rope_theta": 77.0}, tie_word_embeddings=True)
    source.save_pretrained(tmp_path / "hf")  # type: ignore[operator]
    perdure("import", "--from", "huggingface", tmp_path / "hf", tmp_path / "root")
    perdure("export", tmp_path / "root", "--to", "huggingface", tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.lm_head.weight is theirs.model.embed_tokens.weight
    assert torch.equal(logits_of(theirs), logits_of(source))


# ---- in


@pytest.mark.parametrize("tied", [False, True])
def test_their_directory_starts_a_run_of_either_kind(tied: bool, tmp_path: Path) -> None:
    source = model_of(tie_word_embeddings=tied)
    source.save_pretrained(tmp_path / "hf", max_shard_size="20KB")  # type: ignore[operator]
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    torch.manual_seed(2)
    other = build_model({**LLAMA, "tie_word_embeddings": tied})
    load(tmp_path / "hf", other, None, tmp_path, no_load_optim=True)
    assert torch.equal(logits_of(other), logits_of(source))
    sizes = {k: v for k, v in LLAMA.items() if k != "model_type"}
    decoder = Decoder(**sizes, tie_word_embeddings=tied)
    load(tmp_path / "hf", decoder, None, tmp_path, no_load_optim=True, rename=["huggingface-to-decoder"])
    torch.testing.assert_close(logits_of(decoder), logits_of(source), rtol=1e-5, atol=1e-6)


def test_a_full_resume_from_weights_alone_is_refused(tmp_path: Path) -> None:
    model_of().save_pretrained(tmp_path / "hf")  # type: ignore[operator]
    model = model_of()
    with pytest.raises(MismatchError, match="no optimizer state") as caught:
        load(tmp_path / "hf", model, torch.optim.AdamW(model.parameters()), tmp_path)
    assert "no_load_optim" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", 8),
        ("rms_norm_eps", 1e-5),
        ("rope_theta", 500000.0),
        ("rope_scaling", {"rope_type": "linear", "factor": 2.0}),
        ("hidden_act", "gelu"),
        ("num_hidden_layers", 3),
        ("tie_word_embeddings", True),
        ("model_type", "mistral"),
    ],
)
@pytest.mark.parametrize("ours", [False, True])
def test_a_config_of_another_model_is_told_by_key(key: str, value: Any, ours: bool, tmp_path: Path) -> None:
    model_of().save_pretrained(tmp_path / "hf")  # type: ignore[operator]
    file = tmp_path / "hf" / "config.json"
    config = json.loads(file.read_text())
    if key.startswith("rope"):
        # As files of older versions say it.
        config.pop("rope_parameters", None)
    file.write_text(json.dumps({**config, key: value}))
    sizes = {k: v for k, v in LLAMA.items() if k != "model_type"}
    model = Decoder(**sizes) if ours else model_of()
    rename = ["huggingface-to-decoder"] if ours else []
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    if ours and key == "model_type":
        # What a decoder is not called says nothing; names and sizes do.
        load(tmp_path / "hf", model, None, tmp_path, no_load_optim=True, rename=rename)
        return
    with pytest.raises(MismatchError, match=r"config\.json") as caught:
        load(tmp_path / "hf", model, None, tmp_path, no_load_optim=True, rename=rename)
    shown = {"rope_theta": "rope_", "rope_scaling": "rope_"}.get(key, key)
    assert f"\n  {shown}" in caught.value.message
    assert all(equal(p, before[name]) for name, p in model.named_parameters())


def test_what_does_not_change_what_is_computed_may_differ(tmp_path: Path) -> None:
    model_of().save_pretrained(tmp_path / "hf")  # type: ignore[operator]
    file = tmp_path / "hf" / "config.json"
    config = {**json.loads(file.read_text()), "torch_dtype": "bfloat16", "use_cache": False, "bos_token_id": 9}
    config = {**config, "attention_dropout": 0.1, "max_position_embeddings": 99, "transformers_version": "4.0.0"}
    file.write_text(json.dumps(config))
    load(tmp_path / "hf", model_of(), None, tmp_path, no_load_optim=True)
    file.write_text("{")
    assert run(["inspect", str(tmp_path / "hf")]) == 1


def test_names_that_are_missing_or_unexpected_are_told_as_of_ours(tmp_path: Path) -> None:
    source = model_of(num_hidden_layers=3)
    source.save_pretrained(tmp_path / "hf")  # type: ignore[operator]
    (tmp_path / "hf" / "config.json").unlink()
    said = r"9 tensors of the checkpoint are not in the model: model\.layers\.2"
    with pytest.raises(MismatchError, match=said) as caught:
        load(tmp_path / "hf", model_of(), None, tmp_path, no_load_optim=True)
    assert "fewer layers" in str(caught.value.hint)
    with pytest.raises(MismatchError, match="tensors of the model are not in the checkpoint"):
        load(tmp_path / "hf", model_of(num_hidden_layers=4), None, tmp_path, no_load_optim=True)


# ---- names


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_name_of_the_families_is_mapped_both_ways(kind: str, tied: bool, tmp_path: Path) -> None:
    """The library's weights leave under the names of MindSpore Transformers, and load here from there."""
    source = model_of(model_type=kind, tie_word_embeddings=tied)
    source.save_pretrained(tmp_path / "hf")  # type: ignore[operator]
    perdure("import", "--from", "huggingface", tmp_path / "hf", tmp_path / "root")
    perdure("export", tmp_path / "root", "--to", "mindformers", tmp_path / "theirs", "--ranks", 2)
    names = Checkpoint(tmp_path / "theirs").names()
    assert {name.rsplit(".", 2)[-2] for name in names} <= THEIRS
    assert {name.split(".", 1)[0] for name in names} <= {"embedding", "decoder", "output_layer"}
    other = model_of(model_type=kind, tie_word_embeddings=tied, num_hidden_layers=2)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    rename = ["mindformers-to-huggingface"]
    load(tmp_path / "theirs", other, None, tmp_path, no_load_optim=True, rename=rename)
    assert torch.equal(logits_of(other), logits_of(source))


THEIRS = {
    "word_embeddings", "input_layernorm", "pre_mlp_layernorm", "final_layernorm", "output_layer",
    "linear_q", "linear_k", "linear_v", "linear_proj", "q_layernorm", "k_layernorm", "gating", "hidden", "linear_fc2",
}  # fmt: skip


# ---- over ranks

TWO_RANKS = """
import json, sys
import torch
import torch.distributed as dist
from perdure.config.load import load_config, load_config_mapping
from perdure.config.ranks import check_ranks
from perdure.models import build_model
from perdure.parallel.apply import parallelize
from perdure.parallel.gradients import own_square, settle
from perdure.parallel.mesh import Mesh, make_mesh
from perdure.train.trainer import Trainer
from perdure.errors import UsageError

folder = sys.argv[1]
dist.init_process_group("gloo")
found = {}
TENSOR = ["parallelism.tensor_parallel=2", "parallelism.sequence_parallel=true"]

# A model cut by tensors against the same model whole.
sizes = dict(vocab_size=65, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, attention_dropout=0.0)
kinds = {
    "llama": {}, "llama, tied": {"tie_word_embeddings": True}, "qwen2": {}, "qwen3": {"head_dim": 8}, "mistral": {},
    "olmo2": {}, "phi3": {"pad_token_id": 0},
}
config = load_config_mapping({"lr_scheduler": {"type": "ConstantWarmUpLR"},
                              "parallelism": {"tensor_parallel": 2, "sequence_parallel": True}})
for name, more in kinds.items():
    result = []
    for cut in (False, True):
        torch.manual_seed(4)
        model = build_model({"model_type": name.split(",")[0], **sizes, **more})
        mesh = Mesh()
        if cut:
            mesh = make_mesh(check_ranks(config, 2), torch.device("cpu"))
            model = parallelize(model, mesh, torch.device("cpu"), config).model
        ids = torch.arange(24).reshape(2, 12)
        loss = torch.nn.functional.cross_entropy(model(ids).logits.flatten(0, 1), (ids * 7 % 65).flatten())
        loss.backward()
        parameters = list(model.parameters())
        settle(parameters)
        kept = {type(p).__name__ for p in parameters}
        square = torch.tensor(own_square([p.grad for p in parameters], mesh), dtype=torch.float64)
        if cut:
            dist.all_reduce(square)
        result.append([float(loss), float(square.sqrt()), sorted(kept)])
    found[name] = result

for name, more in {"gpt2": {}, "mixtral": {}, "llama": {"num_key_value_heads": 1}}.items():
    own = {} if name == "gpt2" else {**sizes, **more}
    try:
        mesh = make_mesh(check_ranks(config, 2), torch.device("cpu"))
        parallelize(build_model({"model_type": name, **own}), mesh, torch.device("cpu"), config)
    except UsageError as error:
        found[f"refused {name}"] = error.message

# Straight, and stopped and resumed.
for layout, words in {"fsdp": [], "tensor": TENSOR}.items():
    for run, steps in (("straight", 6), ("stopped", 3), ("stopped", 6)):
        given = [f"output_dir={folder}/{layout}-{run}", f"training.steps={steps}", *words]
        Trainer(load_config(f"{folder}/run.yaml", given)).train()

# Weights of theirs, each rank its part.
given = [f"output_dir={folder}/from-hf", "training.steps=1", f"checkpoint.load_path={folder}/hf",
         "checkpoint.no_load_optim=true", "model.vocab_size=20000", "model.hidden_size=1024",
         "lr_scheduler.learning_rate=0.0", "optimizer.weight_decay=0.0"]
trainer = Trainer(load_config(f"{folder}/run.yaml", given))
trainer.train()
reads = [None, None]
dist.all_gather_object(reads, trainer.checkpointer.loaded.bytes_read)
found["reads"] = reads
if dist.get_rank() == 0:
    print(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
"""
RUN = """
training: {steps: 6, local_batch_size: 1, global_batch_size: 4}
model: {type: transformers, model_type: llama, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
        num_attention_heads: 4, num_key_value_heads: 2, attention_dropout: 0.1}
lr_scheduler: {type: CosineWithWarmUpLR, learning_rate: 0.01, total_steps: 6}
train_dataset: {num_parallel_workers: 0, dataloader: {type: Text, path: python-docs, seq_length: 16, shuffle: true}}
checkpoint: {save_interleaved_steps: 3, auto_resume: true}
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """One job of two ranks, and what it found."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "run.yaml").write_text(RUN)
    (folder / "job.py").write_text(TWO_RANKS)
    big = model_of(vocab_size=20000, hidden_size=1024)
    big.save_pretrained(folder / "hf")  # type: ignore[operator]
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", str(folder / "job.py"), str(folder)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, json.loads(done.stdout.splitlines()[-1])


def test_cut_by_tensors_they_compute_what_they_compute_whole(job: tuple[Path, dict[str, Any]]) -> None:
    found = job[1]
    compared = [name for name in found if name != "reads" and not name.startswith("refused")]
    assert len(compared) == 7
    for name in compared:
        (loss, norm, _), (cut_loss, cut_norm, kinds) = found[name]
        assert cut_loss == pytest.approx(loss, rel=1e-6), name
        assert cut_norm == pytest.approx(norm, rel=1e-5), name
        assert kinds == ["DTensor"], name


def test_what_cannot_be_cut_by_tensors_is_refused_in_words(job: tuple[Path, dict[str, Any]]) -> None:
    found = job[1]
    assert "no plan for GPT2LMHeadModel" in found["refused gpt2"]
    assert "moe_tp_experts" in found["refused mixtral"]
    assert "num_key_value_heads 1 does not divide among 2 ranks" in found["refused llama"]


@pytest.mark.parametrize("layout", ["fsdp", "tensor"])
def test_they_resume_bit_for_bit_on_two_ranks(layout: str, job: tuple[Path, dict[str, Any]]) -> None:
    from perdure.catalog.diff import diff
    from perdure.train.history import read_lines, superseded

    straight, stopped = (job[0] / f"{layout}-{run}" for run in ("straight", "stopped"))
    report = diff(straight / "checkpoint", stopped / "checkpoint", read_data=True)
    assert (report.tensors, report.progress) == ([], {})
    keys = ("step", "loss", "grad_norm", "samples")
    files = [str(each / "metrics.jsonl") for each in (straight, stopped)]
    traces = [[[row[key] for key in keys] for row in superseded(read_lines(file))] for file in files]
    assert len(traces[0]) == 6
    assert traces[0] == traces[1]


def test_no_rank_reads_the_whole_of_their_weights(job: tuple[Path, dict[str, Any]]) -> None:
    folder, found = job
    whole = sum(p.stat().st_size for p in (folder / "hf").glob("*.safetensors"))
    assert max(found["reads"]) < 0.75 * whole
    assert sum(found["reads"]) >= whole * 0.9
    from safetensors.torch import load_file

    given = [
        f"checkpoint.load_path={folder}/hf", "checkpoint.no_load_optim=true", "model.vocab_size=20000",
        "model.hidden_size=1024", f"output_dir={folder}/another",
    ]  # fmt: skip
    said = explain(load_config(folder / "run.yaml", given), ranks=2)
    assert (said.problems, said.reads) == ([], found["reads"])
    model = model_of(vocab_size=20000, hidden_size=1024)
    perdure("export", folder / "from-hf" / "checkpoint", "--to", "torch", folder / "weights.pt")
    now = torch.load(folder / "weights.pt", weights_only=True)
    was = load_file(folder / "hf" / "model.safetensors")
    assert all(equal(now[name], was[name]) for name, _ in model.named_parameters())
