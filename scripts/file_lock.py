"""A lock between processes, so that two runs at once don't build the same thing."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def locked(lock_path: Path, waiting_for: str) -> Iterator[None]:
    """Hold an exclusive lock on the file `lock_path`, which is made if it isn't there.

    The lock goes with the process, so a killed run leaves nothing to clear by hand.
    """
    lock_path.parent.mkdir(parents=True, exist_ok=True)
    with lock_path.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"Waiting for another run that is {waiting_for} ...", flush=True)
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield
