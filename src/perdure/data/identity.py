"""Whether data are still those that a checkpoint was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perdure.format.digest import digest_bytes

__all__ = ["differences", "has_grown", "identity_of"]


def identity_of(dataset: Any, name: str, length: int | None) -> dict[str, Any]:
    """What a data set is: `type`, `length`, `fingerprint` (None where unknown), and what it says of itself.

    Args:
        name: what its class is called.
    """
    own = getattr(dataset, "identity", None)
    if callable(own):
        return {"type": name, "length": length, "fingerprint": None, **own()}
    return {"type": name, "length": length, "fingerprint": _fingerprint(dataset)}


def _fingerprint(dataset: Any) -> str | None:
    """Of torch's views of other data sets, which are known without reading a sample: a split that is drawn anew at each
    start has other samples every time."""
    # Here, as audits compare identities without torch and numpy.
    import numpy as np
    from torch.utils.data import ConcatDataset, Subset

    inner: list[Any]
    if isinstance(dataset, Subset):
        inner, order = [dataset.dataset], np.asarray(dataset.indices, dtype=np.int64).tobytes()
    elif isinstance(dataset, ConcatDataset):
        inner, order = list(dataset.datasets), b""
    else:
        return None
    parts = [sorted(identity_of(each, type(each).__qualname__, len(each)).items()) for each in inner]
    return digest_bytes(order + repr(parts).encode())


def differences(
    saved: Mapping[str, Any], present: Mapping[str, Any], *, consumed_samples: int = 0, grown: bool = False
) -> list[str]:
    """What has changed between two identities of a data set, as `key: saved -> present`; empty when nothing.

    A mixture may gain sources at the end of its list, and changes of weights at positions that are not
    consumed yet: then every sample consumed so far is still where it was.

    Args:
        saved: `ResumableLoader.identity()` as the checkpoint holds it.
        present: the same of the data at hand.
        consumed_samples: the position of the checkpoint.
        grown: more samples at the end are no difference; names and sizes of files then differ with them.
    """
    if saved.get("type") == present.get("type") == "Mixture" and _mixture_goes_on(saved, present, consumed_samples):
        return []
    if grown and has_grown(saved, present):
        saved = {**saved, "length": present["length"], "fingerprint": present.get("fingerprint")}
    if saved.get("fingerprint") is None:
        # Nobody knew one then.
        present = {**present, "fingerprint": None}
        saved = {**saved, "fingerprint": None}
    keys = [*saved, *(key for key in present if key not in saved)]
    return [
        f"{key}: {_shown(saved.get(key))} -> {_shown(present.get(key))}"
        for key in keys
        if saved.get(key) != present.get(key)
    ]


def has_grown(saved: Mapping[str, Any], present: Mapping[str, Any]) -> bool:
    """Whether a data set has more samples than before, and is one whose old samples can then still be the same."""
    before, after = saved.get("length"), present.get("length")
    orders_itself = present.get("type") in ("Mixture", "Packed")
    return isinstance(before, int) and isinstance(after, int) and before < after and not orders_itself


def _mixture_goes_on(saved: Mapping[str, Any], present: Mapping[str, Any], consumed_samples: int) -> bool:
    before, after = list(saved.get("sources", ())), list(present.get("sources", ()))
    if after[: len(before)] != before:
        return False
    old, new = list(saved.get("weights", ())), list(present.get("weights", ()))
    if len(old) > len(new):
        return False
    # A weight of 0 for a source added later says nothing about the past.
    same = all(
        at == new_at and weights == new_weights[: len(weights)] and set(new_weights[len(weights) :]) <= {"0"}
        for (at, weights), (new_at, new_weights) in zip(old, new, strict=False)
    )
    return same and all(at >= consumed_samples for at, _ in new[len(old) :])


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
