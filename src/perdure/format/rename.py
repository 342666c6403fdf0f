"""Names of one program turned into names of another, on the record alone: no byte of a tensor is touched.

Rules are applied in order to every parameter's name (the state in front of an optimizer tensor's name stays):

- `[pattern, replacement]`: a regular expression, replaced wherever it is found.
- a text: one of the ready maps in `READY`.
- `{split: pattern, into: [names], rows: [numbers]}`: a fused tensor becomes several. Its rows (first dimension) repeat
  in groups of `rows`: contiguous parts are one group (`[q, k, v]` rows), heads that are kept together are many.
- `{join: [patterns], into: name, rows: [numbers]}`: the reverse.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from perdure.errors import MismatchError
from perdure.format.metadata import CheckpointMetadata, Section, ShardRecord, TensorRecord

__all__ = ["READY", "Renamed", "RowView", "parse_rules", "rename"]

_TO_HUGGINGFACE = (
    (r"^embedding\.word_embeddings\.", "model.embed_tokens."),
    (r"^decoder\.layers\.", "model.layers."),
    (r"^decoder\.final_layernorm\.", "model.norm."),
    (r"^output_layer\.", "lm_head."),
    (r"\.self_attention\.linear_([qkv])\.", r".self_attn.\1_proj."),
    (r"\.self_attention\.linear_proj\.", ".self_attn.o_proj."),
    (r"\.self_attention\.([qk])_layernorm\.", r".self_attn.\1_norm."),
    (r"\.pre_mlp_layernorm\.", ".post_attention_layernorm."),
    (r"\.mlp\.gating\.", ".mlp.gate_proj."),
    (r"\.mlp\.hidden\.", ".mlp.up_proj."),
    (r"\.mlp\.linear_fc2\.", ".mlp.down_proj."),
)
_FROM_HUGGINGFACE = (
    (r"^model\.embed_tokens\.", "embedding.word_embeddings."),
    (r"^model\.layers\.", "decoder.layers."),
    (r"^model\.norm\.", "decoder.final_layernorm."),
    (r"^lm_head\.", "output_layer."),
    (r"\.self_attn\.([qkv])_proj\.", r".self_attention.linear_\1."),
    (r"\.self_attn\.o_proj\.", ".self_attention.linear_proj."),
    (r"\.self_attn\.([qk])_norm\.", r".self_attention.\1_layernorm."),
    (r"\.post_attention_layernorm\.", ".pre_mlp_layernorm."),
    (r"\.mlp\.gate_proj\.", ".mlp.gating."),
    (r"\.mlp\.up_proj\.", ".mlp.hidden."),
    (r"\.mlp\.down_proj\.", ".mlp.linear_fc2."),
)
_BARE = ((r"^model\.", ""),)
_FROM_DECODER = ((r"^(?!lm_head\.)", "model."),)

READY: dict[str, tuple[tuple[str, str], ...]] = {
    "mindformers-to-huggingface": _TO_HUGGINGFACE,
    "huggingface-to-mindformers": _FROM_HUGGINGFACE,
    "mindformers-to-decoder": (*_TO_HUGGINGFACE, *_BARE),
    "huggingface-to-decoder": _BARE,
    "decoder-to-huggingface": _FROM_DECODER,
    "decoder-to-mindformers": (*_FROM_DECODER, *_FROM_HUGGINGFACE),
}
"""Maps for the llama and qwen families; fused tensors need a `split` or `join` of their own besides."""


class _Substitute(NamedTuple):
    pattern: re.Pattern[str]
    replacement: str


class _Split(NamedTuple):
    pattern: re.Pattern[str]
    into: tuple[str, ...]
    rows: tuple[int, ...]


class _Join(NamedTuple):
    patterns: tuple[re.Pattern[str], ...]
    into: str
    rows: tuple[int, ...]


Rule = _Substitute | _Split | _Join


class RowView(NamedTuple):
    """Where a renamed shard's bytes are: rows from `skip` on of a shard that lies in a file under another name."""

    name: str
    shard: ShardRecord
    skip: int


@dataclass
class Renamed:
    """The record under its new names, and where each of its shards comes from: (section, new name, shard index)."""

    metadata: CheckpointMetadata
    views: dict[tuple[Section, str], dict[ShardRecord, RowView]] = field(default_factory=dict)


def parse_rules(rules: Sequence[Any]) -> list[Rule]:
    """Rules as they stand in a configuration.

    Raises:
        ValueError: one of them cannot be meant; the text says which and what was expected.
    """
    parsed: list[Rule] = []
    for number, rule in enumerate(rules, start=1):
        try:
            parsed += _rule(rule)
        except (re.error, TypeError, ValueError, KeyError, IndexError) as error:
            said = str(error) if isinstance(error, ValueError | re.error) else f"{rule!r} cannot be meant"
            raise ValueError(f"rule {number}: {said}") from None
    return parsed


def _rule(rule: Any) -> list[Rule]:
    if isinstance(rule, str):
        if rule not in READY:
            raise ValueError(f"no ready map {rule!r}; there are {', '.join(READY)}")
        return [_Substitute(re.compile(p), r) for p, r in READY[rule]]
    if isinstance(rule, list | tuple) and len(rule) == 2 and all(isinstance(part, str) for part in rule):
        pattern = re.compile(rule[0])
        _check_replacement(pattern, rule[1])
        return [_Substitute(pattern, rule[1])]
    if isinstance(rule, dict) and set(rule) in ({"split", "into", "rows"}, {"join", "into", "rows"}):
        rows = tuple(rule["rows"])
        if len(rows) < 2 or not all(type(n) is int and n > 0 for n in rows):
            raise ValueError(f"rows {rule['rows']!r} are not two or more positive numbers")
        many = rule["into"] if "split" in rule else rule["join"]
        if not isinstance(many, list | tuple) or len(many) != len(rows) or not all(isinstance(n, str) for n in many):
            raise ValueError(f"{len(rows)} rows need as many names, found {many!r}")
        if "split" in rule:
            pattern = re.compile(rule["split"])
            for name in many:
                _check_replacement(pattern, name)
            return [_Split(pattern, tuple(many), rows)]
        patterns = tuple(re.compile(name) for name in many)
        _check_replacement(patterns[0], rule["into"])
        return [_Join(patterns, rule["into"], rows)]
    raise ValueError(
        f"expected [pattern, replacement], a ready map, or a split or join with into and rows; found {rule!r}"
    )


def _check_replacement(pattern: re.Pattern[str], replacement: str) -> None:
    """A reference to a group that isn't there is found before any name is."""
    if not isinstance(replacement, str):
        raise ValueError(f"{replacement!r} is not a name")
    groups = {*map(str, range(pattern.groups + 1)), *pattern.groupindex}
    named = {number or name for number, name in re.findall(r"\\(?:(\d+)|g<(\w+)>)", replacement)}
    if not named <= groups:
        raise ValueError(f"{replacement!r} names a group that {pattern.pattern!r} lacks")


def rename(metadata: CheckpointMetadata, rules: Sequence[Rule], where: str) -> Renamed:
    """The record with the rules applied to its model and optimizer.

    Raises:
        MismatchError: two tensors would get one name, or rows don't fit a tensor.
    """
    renamed = Renamed(msgspec.structs.replace(metadata, model={}, optimizer={}, training=dict(metadata.training)))
    sections: tuple[Section, Section] = ("model", "optimizer")
    for section in sections:
        tensors = {
            name: _Tensor(record, [RowView(name, shard, 0) for shard in record.shards])
            for name, record in metadata.section(section).items()
        }
        for rule in rules:
            tensors = _apply(rule, tensors, section == "optimizer", where)
        records = renamed.metadata.section(section)
        for name, tensor in tensors.items():
            records[name] = tensor.record
            renamed.views[section, name] = dict(zip(tensor.record.shards, tensor.views, strict=True))
    described = renamed.metadata.training.get("optimizer")
    if isinstance(described, dict) and rules:
        renamed.metadata.training["optimizer"] = _description_renamed(described, renamed)
    renamed.metadata.check(where)
    return renamed


def _description_renamed(described: dict[str, Any], renamed: Renamed) -> dict[str, Any]:
    """What is said of the optimizer, with each parameter and each tensor under its new names."""
    new: dict[Section, dict[str, list[str]]] = {"model": {}, "optimizer": {}}
    for (section, name), views in renamed.views.items():
        for old in dict.fromkeys(view.name for view in views.values()):
            new[section].setdefault(old, []).append(name)

    def parameters(names: Sequence[str]) -> list[str]:
        return [each for name in names for each in new["model"].get(name, [])]

    told = {**described, "groups": [{**g, "params": parameters(g["params"])} for g in described.get("groups", [])]}
    if "values" in described:
        values = described["values"].items()
        told["values"] = {each: how for name, how in values for each in new["optimizer"].get(name, [name])}
        if "$without_step" in told["values"]:
            told["values"]["$without_step"] = parameters(told["values"]["$without_step"])
    if "dormant" in described:
        told["dormant"] = parameters(described["dormant"])
    return told


@dataclass
class _Tensor:
    """A tensor under way: its record, and a view for each of its shards."""

    record: TensorRecord
    views: list[RowView]


def _apply(rule: Rule, tensors: dict[str, _Tensor], stateful: bool, where: str) -> dict[str, _Tensor]:
    result: dict[str, _Tensor] = {}

    def put(name: str, tensor: _Tensor, source: str) -> None:
        if name in result:
            raise MismatchError(
                f"{where}: checkpoint.rename gives {source[:200]} the name {name[:200]}, which another tensor has",
                hint="make the pattern narrower",
            )
        result[name] = tensor

    if isinstance(rule, _Join):
        return _join(rule, tensors, stateful, where, put, result)
    for full, tensor in tensors.items():
        state, name = _parts(full, stateful)
        if not name:
            put(full, tensor, full)
            continue
        if isinstance(rule, _Substitute):
            aliases = tuple(rule.pattern.sub(rule.replacement, alias) for alias in tensor.record.aliases)
            tensor.record = msgspec.structs.replace(tensor.record, aliases=aliases)
            put(state + rule.pattern.sub(rule.replacement, name), tensor, full)
            continue
        match = rule.pattern.fullmatch(name)
        if match is None:
            put(full, tensor, full)
            continue
        for number, template in enumerate(rule.into):
            put(state + match.expand(template), _part(tensor, rule.rows, number, full, where), full)
    return result


def _parts(full: str, stateful: bool) -> tuple[str, str]:
    """`adam_m.` and the parameter's name, for optimizer tensors; a name without a dot is no parameter's."""
    if not stateful:
        return "", full
    state, dot, name = full.partition(".")
    return (state + dot, name) if dot else (full, "")


def _blocks(rows: Sequence[int], number: int, groups: int) -> list[tuple[int, int, int]]:
    """(row in the fused tensor, row in part `number`, count) of each group."""
    size, before = sum(rows), sum(rows[:number])
    return [(group * size + before, group * rows[number], rows[number]) for group in range(groups)]


def _groups(shape: Sequence[int], size: int, full: str, where: str) -> int:
    if not shape or shape[0] % size:
        raise MismatchError(
            f"{where}: checkpoint.rename: {full[:200]} has the shape {list(shape)}, whose rows are not a multiple "
            f"of {size}"
        )
    return shape[0] // size


def _part(tensor: _Tensor, rows: Sequence[int], number: int, full: str, where: str) -> _Tensor:
    """Part `number` of a fused tensor."""
    record = tensor.record
    groups = _groups(record.shape, sum(rows), full, where)
    part = _Tensor(TensorRecord(record.dtype, (groups * rows[number], *record.shape[1:]), [], record.logical), [])
    _move(tensor, part, _blocks(rows, number, groups))
    return part


def _move(source: _Tensor, target: _Tensor, blocks: Sequence[tuple[int, int, int]]) -> None:
    """Adds to `target` what `source`'s shards have of `blocks`: (row in source, row in target, count), ascending."""
    for shard, view in zip(source.record.shards, source.views, strict=True):
        first, last = shard.offset[0], shard.offset[0] + shard.shape[0]
        for begin, to, count in blocks:
            low, high = max(first, begin), min(last, begin + count)
            if low >= high:
                continue
            whole = high - low == shard.shape[0]
            moved = ShardRecord(
                shard.file,
                (to + low - begin, *shard.offset[1:]),
                (high - low, *shard.shape[1:]),
                # A digest is of the whole; who reads a part by its view has it checked all the same.
                shard.digest if whole else "",
                shard.blocks if whole else (),
                shard.key or view.name,
            )
            target.record.shards.append(moved)
            target.views.append(RowView(view.name, view.shard, view.skip + low - first))


def _join(
    rule: _Join,
    tensors: dict[str, _Tensor],
    stateful: bool,
    where: str,
    put: Callable[[str, _Tensor, str], None],
    result: dict[str, _Tensor],
) -> dict[str, _Tensor]:
    parts: dict[str, dict[int, str]] = {}
    for full, tensor in tensors.items():
        state, name = _parts(full, stateful)
        for number, pattern in enumerate(rule.patterns):
            match = pattern.fullmatch(name)
            if match is not None:
                parts.setdefault(state + match.expand(rule.into), {})[number] = full
                break
        else:
            put(full, tensor, full)
    for name, found in parts.items():
        if len(found) != len(rule.patterns):
            raise MismatchError(
                f"{where}: checkpoint.rename: {name[:200]} is to be joined of {len(rule.patterns)} tensors, "
                f"found {', '.join(found.values())[:300]}"
            )
        sources = [tensors[found[number]] for number in range(len(rule.patterns))]
        heads = [
            _groups(s.record.shape, n, found[i], where) for i, (s, n) in enumerate(zip(sources, rule.rows, strict=True))
        ]
        kinds = {(s.record.dtype, s.record.shape[1:], s.record.logical) for s in sources}
        if len(set(heads)) != 1 or len(kinds) != 1:
            raise MismatchError(f"{where}: checkpoint.rename: {', '.join(found.values())[:300]} do not fit together")
        first = sources[0].record
        joined = _Tensor(
            TensorRecord(first.dtype, (heads[0] * sum(rule.rows), *first.shape[1:]), [], first.logical), []
        )
        for number, source in enumerate(sources):
            turned = [(own, fused, count) for fused, own, count in _blocks(rule.rows, number, heads[0])]
            _move(source, joined, turned)
        put(name, joined, next(iter(found.values())))
    return result
