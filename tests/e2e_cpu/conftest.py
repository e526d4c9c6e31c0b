"""What several files share: a start costs seconds of processor time, and most tests only ask."""

from collections.abc import Iterator

import pytest
from cluster import Cluster, Server, cluster
from gateway import sglang_router
from transfer_world import eventually, transfer_threads


@pytest.fixture(scope="session")
def common() -> Iterator[Cluster]:
    """A pair behind our router and one engine beside it, for tests that leave them as they were: alive and idle.

    Deterministic: then "the same tokens" has no exception for near-ties, whatever else was in the batch.
    """
    with cluster(prefills=1, decodes=1, unified=True, flags=["--deterministic"]) as it:
        yield it


@pytest.fixture(scope="module")
def it(common: Cluster) -> Cluster:
    """The servers of a file: the common ones, unless it starts some of its own under this name."""
    return common


@pytest.fixture(scope="module")
def router(it: Cluster) -> Server:
    assert it.router is not None
    return it.router


@pytest.fixture(scope="module")
def unified(it: Cluster) -> Server:
    assert it.unified is not None
    return it.unified


@pytest.fixture(scope="session")
def common_gateway(common: Cluster) -> Server:
    """sglang-router in front of the same pair."""
    return sglang_router(common)


@pytest.fixture
def no_transfer_thread_is_left() -> Iterator[None]:
    """Of the data planes that a test opens in its own process."""
    yield
    eventually(lambda: not transfer_threads(), f"the end of {transfer_threads()}")
