"""What tests of benchmarks share."""

from __future__ import annotations

import os

import pytest

from benchmarks.netns import NetworkUnavailableError, shaped_network


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skips where this user or machine cannot make network namespaces."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    try:
        with shaped_network(1) as net:
            net.shape("1gbit")
    except NetworkUnavailableError as cause:
        pytest.skip(f"no network namespaces here: {cause}")
