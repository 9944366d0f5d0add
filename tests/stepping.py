"""Drives an in-process engine step by step, so that tests can look at it between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm import LLM, SamplingParams

from tests.engines import greedy


@dataclass
class Stepper:
    """Requests of one engine, by id: generated tokens so far, and prompt tokens from the prefix cache."""

    llm: LLM
    tokens: dict[str, list[int]] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    cached_tokens: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.engine = self.llm.llm_engine
        self.scheduler: Any = self.engine.engine_core.engine_core.scheduler
        self.manager: Any = self.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
        self.runner: Any = (
            self.engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        )

    def add(self, request_id: str, prompt: list[int], params: SamplingParams | int) -> None:
        sampling = params if isinstance(params, SamplingParams) else greedy(params, detokenize=False)
        self.engine.add_request(request_id, {"prompt_token_ids": list(prompt)}, sampling)
        self.tokens[request_id] = []

    def abort(self, request_id: str) -> None:
        self.engine.abort_request([request_id])
        self.finished.add(request_id)

    def forget(self, request_id: str) -> None:
        """Drop what is known of a request that has ended."""
        self.finished.remove(request_id)
        del self.tokens[request_id]
        self.cached_tokens.pop(request_id, None)

    def blocks_of(self, request_id: str) -> list[Any]:
        """The request's block table in the scheduler; lost blocks are null blocks."""
        return self.manager.req_to_blocks[self._internal(request_id)]

    def _internal(self, request_id: str) -> str:
        """vLLM's own id of a request: the given one and a random suffix."""
        (internal,) = [name for name in self.scheduler.requests if name.rsplit("-", 1)[0] == request_id]
        return internal

    def step(self) -> None:
        for output in self.engine.step():
            self.tokens[output.request_id] = list(output.outputs[0].token_ids)
            self.cached_tokens[output.request_id] = output.num_cached_tokens or 0
            if output.finished:
                self.finished.add(output.request_id)

    def run(self, watch: Callable[[], None] | None = None) -> dict[str, list[int]]:
        """Step until nothing is left; ``watch`` is called after every step."""
        while self.engine.has_unfinished_requests():
            self.step()
            if watch is not None:
                watch()
        return self.tokens

    @property
    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def requests(self) -> Iterator[Any]:
        """The scheduler's running requests."""
        yield from self.scheduler.running

    def held_blocks(self) -> Mapping[str, int]:
        """Blocks that each running request really holds (null blocks not counted)."""
        null = self.manager.block_pool.null_block
        return {
            request.request_id: sum(
                block is not null for block in self.manager.req_to_blocks.get(request.request_id, ())
            )
            for request in self.scheduler.running
        }

    def assert_idle(self, free_blocks: int) -> None:
        """Nothing is left behind: no request, no table, no block; counts as they were at the start."""
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert not self.manager.req_to_blocks
        assert not self.manager.num_cached_block
        assert self.free_blocks == free_blocks


def solo(llm: LLM, prompt: list[int], params: SamplingParams | int) -> list[int]:
    """What a request generates when it is alone on the engine."""
    stepper = Stepper(llm)
    stepper.add("solo", prompt, params)
    return stepper.run()["solo"]
