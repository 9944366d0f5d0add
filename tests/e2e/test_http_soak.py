"""Clients of all kinds for half a minute, on the server that the other tests share."""

from __future__ import annotations

import pytest

from tests.e2e.servers import Server
from tests.http_soak import soak

pytestmark = pytest.mark.e2e


def test_nothing_is_left_of_any_client(server: Server) -> None:
    counts = soak(server, 30, seed=1, longest_words=400)
    kinds = ("whole", "stream", "leave", "samples", "json", "talk", "wrong")
    assert all(counts[kind] for kind in kinds), counts
    assert counts["evicted tokens reported"] > 0
