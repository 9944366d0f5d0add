"""What every peer runs: workloads, their prompts, and the variants of each peer.

Standard library only, and for any Python of at least 3.11: every peer's environment imports it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

PEERS = ("hf", "kvpress", "openvino", "vllm", "h2o")
ONE_BATCH_AT_A_TIME = ("hf", "kvpress")
"""Peers without continuous batching: they have no pool of KV, and wait for a whole batch to finish."""

PROJECT_PEERS = ("vllm", "h2o")
"""Peers that run in the project's own environment."""

BLOCK_TOKENS = 32  # the only KV block size of OpenVINO on CPU, so vLLM gets it, too
MAX_BATCHED_TOKENS = 2048
STATIC_BATCH = 4
WARM_UP_TOKENS = (64, 4)


@dataclass(frozen=True)
class Workload:
    """Equal requests that all arrive at once.

    Attributes:
        budget_tokens: KV tokens that a request may keep where the peer has a limit per request.
        pools: per name the KV tokens that a peer with a pool gets for all requests together.
        max_model_len: longest request in tokens that vLLM is told to expect.
    """

    name: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    budget_tokens: int
    pools: dict[str, int]
    max_model_len: int

    @property
    def description(self) -> str:
        """In one line, as titles of tables have it."""
        pools = ", ".join(f"{name} {tokens:,}" for name, tokens in self.pools.items())
        return (
            f"{self.requests} x {self.prompt_tokens:,} + {self.output_tokens:,} tokens, "
            f"budget {self.budget_tokens:,}, KV pools in tokens: {pools}"
        )

    def quick(self) -> Workload:
        """A tiny one of the same shape: a prompt over the budget, a pool that doesn't hold all."""
        return replace(
            self,
            name=f"{self.name}-quick",
            requests=2,
            prompt_tokens=128,
            output_tokens=16,
            budget_tokens=96,
            pools=dict(zip(self.pools, (192, 320), strict=False)),
            max_model_len=160,
        )


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("w1", 16, 2048, 256, 512, {"small": 9216, "ample": 40960}, 4096),
        # 20 % of max_model_len in whole blocks, which is what the plugin makes of a budget of 0.2.
        Workload("w2", 1, 6144, 256, 1664, {"ample": 8192}, 8192),
        Workload("w3", 8, 4096, 128, 512, {"small": 9216, "ample": 40960}, 8192),
        # A quarter of what the full caches of all requests take.
        Workload("w4", 16, 256, 1024, 256, {"small": 5120}, 2048),
    )
}


@dataclass(frozen=True)
class Variant:
    """One way to run a peer.

    Attributes:
        method: what is done to the KV cache, in words of the table.
        batch: requests of a static batch; 0 where the peer schedules requests by itself.
        pool: name of one of the workload's pools; empty where the peer has none.
        evicts: whether the KV of a request is limited.
    """

    peer: str
    method: str
    batch: int = 0
    pool: str = ""
    evicts: bool = False

    @property
    def label(self) -> str:
        """Unique among the variants of a workload."""
        where = f", {self.pool} pool" if self.pool else ""
        size = f", batch {self.batch}" if self.peer == "hf" else ""
        return f"{self.peer}: {self.method}{where}{size}"


def variants(workload: Workload, peer: str) -> Iterator[Variant]:
    """All variants of one peer that say something about the workload."""
    batch = min(STATIC_BATCH, workload.requests)
    if peer == "hf":
        for size in sorted({1, batch}):
            yield Variant(peer, "full cache", batch=size)
    elif peer == "kvpress":
        # It compresses prompts only, so with short ones it would be `hf` with a slower attention.
        if workload.prompt_tokens > workload.budget_tokens:
            yield Variant(peer, "observed attention", batch=batch, evicts=True)
        yield Variant(peer, "observed attention, decoding too", batch=batch, evicts=True)
    elif peer == "openvino":
        for pool in workload.pools:
            yield Variant(peer, "full cache", pool=pool)
            yield Variant(peer, "cache eviction", pool=pool, evicts=True)
    else:
        for pool in workload.pools:
            yield Variant(peer, "h2o" if peer == "h2o" else "full cache", pool=pool, evicts=peer == "h2o")


@dataclass(frozen=True)
class Task:
    """What the process of one run is told, as JSON on its standard input.

    Attributes:
        model: folder of the Hugging Face model.
        cache: folder for what a peer makes of the model once.
        requests: how many of the workload's requests are run.
        threads: CPU threads of the model's computations.
    """

    workload: Workload
    variant: Variant
    model: str
    cache: str
    requests: int
    threads: int

    def to_json(self) -> dict[str, Any]:
        """Plain values, which ``from_json`` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Task:
        """The task that ``to_json`` wrote."""
        return cls(
            **{
                **values,
                "workload": Workload(**values["workload"]),
                "variant": Variant(**values["variant"]),
            }
        )


def prompt(request: int, tokens: int) -> list[int]:
    """Token ids of one request's prompt, from 100 to 40,099, the same in every peer.

    Prompts differ from their first token on, so that no cache of prefixes helps anyone, and the ids are
    none of a special token.
    """
    return [(7919 * (request + 1) + 104729 * position) % 40000 + 100 for position in range(tokens)]


def prompts(task: Task) -> list[list[int]]:
    """The prompts of all requests that the task runs."""
    return [prompt(request, task.workload.prompt_tokens) for request in range(task.requests)]


def warm_up_prompt(task: Task) -> list[int]:
    """A short prompt that is none of the task's."""
    return prompt(task.workload.requests, WARM_UP_TOKENS[0])


def recent_tokens(budget_tokens: int, wanted: int) -> int:
    """Newest tokens that are never dropped: ``wanted``, less where the budget has no room for it.

    Beside them there is one block of first tokens, and at least one block to choose in.
    """
    return min(wanted, budget_tokens - 2 * BLOCK_TOKENS)
