"""Changed data are noticed with both values; a mixture may grow where nothing is consumed yet."""

from __future__ import annotations

from typing import Any

import pytest
from torch.utils.data import ConcatDataset, Subset

from perdure.data.identity import differences, identity_of
from perdure.data.mixture import Mixture


def test_both_values_are_shown() -> None:
    saved = {"type": "Text", "length": 5, "fingerprint": "a"}
    assert differences(saved, dict(saved)) == []
    assert differences(saved, {**saved, "length": 6}) == ["length: 5 -> 6"]
    assert differences(saved, {**saved, "dtype": "uint16"}) == ["dtype: None -> 'uint16'"]


def test_a_mixture_may_change_after_what_is_consumed() -> None:
    sources = [range(10), range(20), range(5)]
    saved = Mixture(sources[:2], weights=[1, 1]).identity()
    grown = Mixture(sources, weights=[1, 1], changes=[{"at": 600, "weights": [1, 1, 2]}]).identity()
    assert differences(saved, grown, consumed_samples=600) == []
    assert differences(grown, grown, consumed_samples=10**6) == []
    assert differences(saved, grown, consumed_samples=601) != []
    assert differences(grown, saved, consumed_samples=0) != []
    assert differences(saved, Mixture(sources[:2], weights=[2, 1]).identity()) != []


@pytest.mark.parametrize("reordered", [[range(20), range(10)], [range(10), range(21)]])
def test_reordered_or_changed_sources_are_noticed(reordered: list[range]) -> None:
    saved = Mixture([range(10), range(20)], weights=[1, 1]).identity()
    assert differences(saved, Mixture(reordered, weights=[1, 1]).identity()) != []


def test_a_split_is_known_by_its_indices_and_a_whole_by_its_parts() -> None:
    class Named(list[int]):
        def identity(self) -> dict[str, str]:
            return {"fingerprint": f"of {sum(self)}"}

    def told(dataset: Any) -> Any:
        return identity_of(dataset, "x", len(dataset))["fingerprint"]

    data: Any = list(range(10))
    one, same, other = Subset(data, [1, 2]), Subset(data, range(1, 3)), Subset(data, [2, 1])
    assert told(one) == told(same) != told(other)
    assert told(data) is None
    first: Any = Named([1, 2])
    second: Any = Named([3, 4])
    assert told(ConcatDataset([first, second])) == told(ConcatDataset([first, second]))
    assert told(ConcatDataset([first, second])) != told(ConcatDataset([second, first]))
    assert told(ConcatDataset([one, first])) != told(ConcatDataset([other, first]))
    saved = identity_of(one, "x", 2)
    assert differences(saved, identity_of(other, "x", 2))[0].startswith("fingerprint: ")
    # A checkpoint from before anybody knew one.
    assert differences({**saved, "fingerprint": None}, identity_of(other, "x", 2)) == []
