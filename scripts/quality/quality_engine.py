"""A real vLLM engine in this process, and what quality tests ask it."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

BLOCK_TOKENS = 32
TOP_LOGPROBS = 20


@contextmanager
def engine(
    model: Path, policy: dict[str, Any] | None, *, max_model_len: int, chunk_tokens: int, trace: bool = False
) -> Iterator[LLM]:
    """An engine that runs one request at a time, in chunks of exactly ``chunk_tokens``.

    float32, so that differences are those of the policies.
    """
    settings = {} if policy is None else {"kv_policy": {**policy, **({"trace": True} if trace else {})}}
    llm = LLM(
        str(model),
        dtype="float32",
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        max_model_len=max_model_len,
        max_num_batched_tokens=chunk_tokens,
        max_num_seqs=1,
        kv_cache_memory_bytes=2**30,
        enable_prefix_caching=False,
        max_logprobs=TOP_LOGPROBS,
        additional_config=settings,
        seed=0,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def answers(llm: LLM, prompts: Sequence[list[int]], max_tokens: Sequence[int]) -> list[str]:
    """Greedy answers."""
    params = [SamplingParams(temperature=0, max_tokens=length) for length in max_tokens]
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def continuation(
    llm: LLM, prompt: list[int], num_tokens: int, *, temperature: float = 0.0, seed: int | None = None
) -> list[int]:
    """Token ids that the model goes on with."""
    params = SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True, seed=seed)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    return list(output.outputs[0].token_ids)


@dataclass(frozen=True)
class Forced:
    """Teacher forcing: what the model thought of each token but the first of a given text.

    Attributes:
        nll: negative log-likelihood of each token, in nats.
        top: per token the log-probabilities of the ``TOP_LOGPROBS`` likeliest tokens.
    """

    nll: list[float]
    top: list[dict[int, float]]

    def kl_from(self, full: Forced) -> list[float]:
        """Per token KL(full || this) in nats, over full's likeliest tokens and all others as one.

        Approximate: a token that isn't among this one's likeliest is taken to be as likely as the last of
        those, or as all that is left, whichever is less.
        """
        return [_kl(theirs, ours) for theirs, ours in zip(full.top, self.top, strict=True)]

    def top1_agreement(self, full: Forced) -> float:
        """Share of tokens whose likeliest prediction is the same."""
        pairs = zip(full.top, self.top, strict=True)
        same = [max(a, key=a.__getitem__) == max(b, key=b.__getitem__) for a, b in pairs]
        return sum(same) / len(same)


def teacher_forced(llm: LLM, ids: list[int]) -> Forced:
    """Have the model read ``ids`` in its chunks."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=TOP_LOGPROBS, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    nll, top = [], []
    for token, logprobs in zip(ids[1:], (output.prompt_logprobs or [])[1:], strict=True):
        assert logprobs is not None
        nll.append(-logprobs[token].logprob)
        likeliest = sorted((entry.logprob, t) for t, entry in logprobs.items())[-TOP_LOGPROBS:]
        top.append({t: logprob for logprob, t in likeliest})
    return Forced(nll, top)


def _kl(full: dict[int, float], other: dict[int, float]) -> float:
    rest_full = max(1e-12, 1 - sum(map(math.exp, full.values())))
    rest_other = max(1e-12, 1 - sum(map(math.exp, other.values())))
    # What is not listed can have at most what is left, and at most as much as the least that is listed.
    floor = min(math.log(rest_other), min(other.values()))
    total = sum(math.exp(lp) * (lp - other.get(token, floor)) for token, lp in full.items())
    seen = sum(math.exp(other.get(token, floor)) for token in full)
    return max(0.0, total + rest_full * math.log(rest_full / max(1e-12, 1 - seen)))
