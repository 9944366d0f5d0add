"""The one error of the peers' scripts."""

from __future__ import annotations


class PeerError(Exception):
    """A peer could not be set up or run.

    The message names the peer, the reason and the fix. Other peers aren't affected.
    """
