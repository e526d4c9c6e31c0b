"""What several files share: a start costs seconds of processor time, and most tests only ask."""

from collections.abc import Iterator

import pytest
from cluster import Cluster, Server, cluster
from gateway import sglang_router


@pytest.fixture(scope="session")
def common() -> Iterator[Cluster]:
    """A pair behind our router and one engine beside it, for tests that leave them as they were: alive and idle.

    Deterministic: then "the same tokens" has no exception for near-ties, whatever else was in the batch.
    """
    with cluster(prefills=1, decodes=1, unified=True, flags=["--deterministic"]) as it:
        yield it


@pytest.fixture(scope="session")
def common_gateway(common: Cluster) -> Server:
    """sglang-router in front of the same pair."""
    return sglang_router(common)
