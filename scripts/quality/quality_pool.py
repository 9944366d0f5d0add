"""Processes that measure side by side, each on cores of its own."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing.queues import SimpleQueue

# Nothing here may import torch: a new process has to know its cores before torch's threads start.


def cpus() -> list[int]:
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


@contextmanager
def pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """That many processes, among which the cores are shared out.

    A small model on one thread is more than half as fast as on two, so that two engines side by side are
    faster than one after the other. What has not begun when the block is left with an error never will.

    Raises:
        ValueError: there are not as many cores.
    """
    available = cpus()
    if not 1 <= processes <= len(available):
        raise ValueError(f"--processes {processes} is not between 1 and the {len(available)} cores there are")
    context = multiprocessing.get_context("spawn")
    shares: SimpleQueue[list[int]] = context.SimpleQueue()
    for i in range(processes):
        shares.put(available[i::processes])
    executor = ProcessPoolExecutor(processes, context, initializer=_enter, initargs=(shares,))
    try:
        yield executor
    finally:
        executor.shutdown(cancel_futures=True)


def _enter(shares: SimpleQueue[list[int]]) -> None:
    cores = shares.get()
    os.environ["OMP_NUM_THREADS"] = str(len(cores))
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that is killed can't tell its processes to end."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
