"""The base of all sections: built by keywords, strict, and telling all faults at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from perdure.config.faults import Fault, Path, SectionError, found
from perdure.config.kinds import wording
from perdure.importing import did_you_mean

__all__ = ["Section", "section_class", "unnamed_key"]


class Section(BaseModel):
    """Base of all sections: strict, frozen, built by keywords.

    Raises:
        ConfigError: keys that the section does not have, or values of another kind or range; all in one go.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())

    def __init__(self, /, **data: Any) -> None:
        data, faults = _nested(type(self), data)
        data, more = self._check_extras(data)
        faults += more
        try:
            super().__init__(**data)
        except ValidationError as error:
            faults += [fault for each in error.errors() for fault in _faults(each, type(self))]
        if faults:
            raise SectionError(faults)

    @classmethod
    def _check_extras(cls, data: dict[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
        """Check keys beyond the fields; gives the values back as they are to be kept."""
        return data, []

    def extras(self) -> dict[str, object]:
        """The further keys of this section, as written."""
        return dict(self.model_extra or {})


def section_class(annotation: object) -> type[Section] | None:
    """The section that a field holds, or None for a field that holds a plain value."""
    for candidate in (annotation, *getattr(annotation, "__args__", ())):
        if isinstance(candidate, type) and issubclass(candidate, Section):
            return candidate
    return None


def _nested(cls: type[Section], data: dict[str, Any]) -> tuple[dict[str, Any], list[Fault]]:
    """Sections inside this one: null stands for an empty one, and their keys are names."""
    data, faults = dict(data), []
    for name, field in cls.model_fields.items():
        nested = section_class(field.annotation)
        if nested is None or name not in data:
            continue
        if data[name] is None and nested is field.annotation:
            data[name] = {}
        elif isinstance(data[name], Mapping):
            faults += [unnamed_key((name,), key) for key in data[name] if type(key) is not str]
            data[name] = {key: value for key, value in data[name].items() if type(key) is str}
    return data, faults


def unnamed_key(path: Path, key: object) -> Fault:
    """The fault of a key, in the mapping at `path`, that is not a name."""
    return Fault((*path, key) if type(key) is int else path, f"expected a name as key, found {found(key)}")


def _faults(error: ErrorDetails, cls: type[Section]) -> list[Fault]:
    inner = error.get("ctx", {}).get("error")
    if isinstance(inner, SectionError):
        return [fault.below(error["loc"]) for fault in inner.faults]
    if error["type"] == "extra_forbidden":
        return [Fault(error["loc"], f"unknown key{did_you_mean(str(error['loc'][-1]), cls.model_fields)}")]
    return [Fault(error["loc"], wording(error))]
