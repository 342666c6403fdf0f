"""The reference page of all keys, rendered from the schema.

python -m perdure.config.reference > docs/reference/configuration.md
"""

from __future__ import annotations

import sys

from pydantic.fields import FieldInfo

from perdure.config.base import Section, section_class
from perdure.config.faults import found
from perdure.config.kinds import annotation_words, kind_words
from perdure.config.not_built import FEATURES_NOT_BUILT
from perdure.config.schedule_keys import KEY_KINDS, REQUIRED, SCHEDULE_KEYS
from perdure.config.schema import TrainConfig

__all__ = ["render_reference"]

_INTRODUCTION = """\
# Configuration

<!-- Generated from the schema by `python -m perdure.config.reference`; edit the descriptions there. -->

One YAML file describes a run. It is read as YAML 1.2: `1e-3` is a number, `no` is text, and a key may be written only
once; anchors and merge keys (`<<`) work, tags do not. Words `section.key=value` on the command line override the file;
their values are YAML too, and of two for one key the later one counts. A list is set whole.

Values are of one kind and are not converted: a key of kind *true or false* takes only `true` and `false`, an *integer*
may be written `10`, `1e1` or `10.0` but never `'10'`, and a number is not *text*. A leading `~` of a *path* is expanded
as a shell does; `./~` is the file of that name. A *name or import path* is a registered name or
`package.module:Object`. A *size* is a number with `B`, `KiB`, `MiB`, `GiB` or `TiB` (or `KB`, `MB`, `GB`, `TB`).

Sections marked + take further keys: they go to the constructor of what `type` names, and are checked against its
signature. Keys marked *not built yet* are refused when they are set to anything but their default.
"""


def render_reference() -> str:
    """The whole page as Markdown."""
    parts = [_INTRODUCTION, "## Top level\n", *_table(_plain_fields(TrainConfig), ""), ""]
    for name, field in TrainConfig.model_fields.items():
        section = section_class(field.annotation)
        if section is None:
            continue
        if name == "eval_dataset":
            parts += [f"## {name}\n", "As `train_dataset`; absent by default.\n"]
            continue
        parts += _section(name, section)
    parts += ["## Keys of the schedules\n", *_schedules(), ""]
    return "\n".join(parts)


def _section(name: str, section: type[Section]) -> list[str]:
    """Heading, purpose and table of a section, and those of the sections inside it."""
    further = " +" if section.model_config.get("extra") == "allow" else ""
    title = f"{name}[]" if name == "callbacks" else name
    parts = [f"## {title}{further}\n", f"{_purpose(section)}\n"]
    fields = _plain_fields(section)
    if fields:
        parts += [*_table(fields, f"{title}."), ""]
    for inner, field in section.model_fields.items():
        nested = section_class(field.annotation)
        if nested is not None:
            parts += _section(f"{name}.{inner}", nested)
    return parts


def _purpose(section: type[Section]) -> str:
    text = " ".join((section.__doc__ or "").split())
    purpose = text.partition(": ")[2] or text
    return purpose[:1].upper() + purpose[1:] if purpose[:1] != "`" else purpose


def _plain_fields(section: type[Section]) -> dict[str, FieldInfo]:
    return {name: field for name, field in section.model_fields.items() if section_class(field.annotation) is None}


def _table(fields: dict[str, FieldInfo], prefix: str) -> list[str]:
    rows = ["| key | kind | default | meaning |", "| --- | --- | --- | --- |"]
    for name, field in fields.items():
        key = f"{prefix}{name}"
        missing = " (not built yet)" if _is_not_built(key) else ""
        rows.append(f"| `{key}` | {kind_words(field)} | {_default(field)} | {field.description}{missing} |")
    return rows


def _is_not_built(key: str) -> bool:
    return any(key == entry or key.startswith(f"{entry}.") for entry in FEATURES_NOT_BUILT)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "(required)"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "null"
    if value == "" or value == []:
        return '`""`' if value == "" else "`[]`"
    return f"`{found(value).removeprefix('the text ')}`".replace("'", "")


def _schedules() -> list[str]:
    names = {kind: ", ".join(f"`{key}`" for key in keys) for kind, keys in SCHEDULE_KEYS.items()}
    rows = ["| type | keys besides `learning_rate` and `by` | required |", "| --- | --- | --- |"]
    rows += [
        f"| `{kind}` | {keys} | {' or '.join(f'`{key}`' for key in REQUIRED.get(kind, ())) or 'none'} |"
        for kind, keys in names.items()
    ]
    rows += ["", "| key | kind |", "| --- | --- |"]
    return [*rows, *(f"| `{key}` | {annotation_words(KEY_KINDS[key])} |" for key in KEY_KINDS)]


if __name__ == "__main__":
    sys.stdout.write(render_reference())
