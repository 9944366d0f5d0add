"""Random schedules of requests, as vLLM's scheduler would hand them to a worker."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from vllm_h2o import retention
from vllm_h2o.config import KVPolicyConfig


@dataclass
class Request:
    """One running request: its table as the worker has it, freed ids included, and how far it is."""

    blocks: list[int]
    prompt_tokens: int
    end_tokens: int
    computed: int = 0
    freed: int = 0

    def held(self, pinned_blocks: int) -> list[int]:
        return self.blocks[:pinned_blocks] + self.blocks[pinned_blocks + self.freed :]


@dataclass
class Step:
    """Rows of one step: `requests` are their numbers, `totals` their tokens with the new ones."""

    requests: list[int]
    totals: list[int]
    new: list[int]
    table: np.ndarray


class Schedule:
    """Requests come, go, are preempted and skip steps; rows change places; freed blocks are reused at once.

    Attributes:
        slots: the requests by number; None where a number is free.
    """

    def __init__(
        self,
        config: KVPolicyConfig,
        seed: int,
        *,
        max_requests: int = 5,
        num_blocks: int = 120,
        chunks: tuple[int, ...] = (1, 3, 8),
    ) -> None:
        self.config = config
        self.draw = random.Random(seed)
        self.chunks = chunks
        self.slots: list[Request | None] = [None] * max_requests
        self.width = -(-config.max_model_len // config.block_size)
        self.free = list(range(1, num_blocks))

    def step(self) -> Step:
        bs = self.config.block_size
        longest = self.config.max_model_len
        for i, request in enumerate(self.slots):
            if request is None:
                if self.draw.random() < 0.4:
                    prompt = self.draw.choice([1, 2, 3, bs, bs + 1, 2 * bs + 1, 7 * bs + 2])
                    self.slots[i] = Request([], prompt, min(prompt + self.draw.randint(1, 15 * bs), longest))
                continue
            if request.computed >= request.end_tokens:
                self.free += request.held(self.config.pinned_blocks)
                self.slots[i] = None
            elif self.draw.random() < 0.02:
                # Preempted: its blocks are gone, its tokens become a prompt.
                self.free += request.held(self.config.pinned_blocks)
                prompt = self.draw.randint(1, request.end_tokens)
                self.slots[i] = Request([], prompt, request.end_tokens)
            else:
                self._free_evicted(request)
        rows = [i for i, request in enumerate(self.slots) if request and self.draw.random() < 0.8]
        self.draw.shuffle(rows)
        step = Step(rows, [], [], np.zeros((len(rows), self.width), dtype=np.int32))
        for row, i in enumerate(rows):
            request = self.slots[i]
            assert request is not None
            left = request.prompt_tokens - request.computed
            step.new.append(min(left, self.draw.choice(self.chunks)) if left > 0 else 1)
            step.totals.append(request.computed + step.new[-1])
            while len(request.blocks) * bs < step.totals[-1]:
                request.blocks.append(self.free.pop())  # the one freed last
            # Behind a row's blocks the runner's table has ids of earlier rows.
            step.table[row] = self.draw.choices(range(1, 9), k=self.width)
            step.table[row, : len(request.blocks)] = request.blocks
            request.computed = step.totals[-1]
        return step

    def _free_evicted(self, request: Request) -> None:
        evicted = retention.evicted_blocks(
            request.computed, budget_tokens=self.config.budget_tokens, block_size=self.config.block_size
        )
        first = self.config.pinned_blocks
        self.free += request.blocks[first + request.freed : first + evicted]
        request.freed = evicted
