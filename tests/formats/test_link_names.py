"""Links by name."""

from __future__ import annotations

import pytest

from planner.errors import UnitError
from planner.formats.link_names import ACHIEVED_BYTES_PER_S, link_bandwidth


def test_names_and_rates() -> None:
    assert link_bandwidth("nvlink3") == pytest.approx(228e9)  # as measured: 229 GB/s
    assert link_bandwidth("PCIe4") == pytest.approx(25.2e9)
    assert link_bandwidth("10Gbps") == 1.25e9


def test_each_generation_is_faster() -> None:
    for kind in ("nvlink", "pcie"):
        rates = [rate for name, rate in ACHIEVED_BYTES_PER_S.items() if name.startswith(kind)]
        assert rates == sorted(set(rates))


@pytest.mark.parametrize(
    ("text", "complaint"), [("nvlink9", "no link that is known"), ("10", "is not a rate")]
)
def test_wrong_input(text: str, complaint: str) -> None:
    with pytest.raises(UnitError, match=complaint):
        link_bandwidth(text)
