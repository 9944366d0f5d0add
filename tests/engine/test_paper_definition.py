"""H2O by its definition, on the real attention of the real model.

The paper's rule in its own terms, with nothing of the oracle: a token's score is its column of the attention
matrix, summed over all queries; half of the budget goes to the highest sums, half to the newest tokens;
survivors keep their sums and go on adding to them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from tests.engines import MODEL, RequestTrace, complete, engine, greedy, take_traces

BLOCK, BUDGET, PROMPT_TOKENS, NEW_TOKENS = 32, 128, 300, 40
RECENT = BUDGET // 2
EVICTED = (PROMPT_TOKENS - BUDGET) // BLOCK + 1
KEPT = PROMPT_TOKENS - EVICTED * BLOCK


WRONG = {"float32": 0.001, "bfloat16": 0.02}
"""Most of the kept tokens that may be others than in float32. In bfloat16 attention may use AMX, with a
cache laid out for it: reading that wrongly would make most of them others."""


@pytest.fixture(scope="module", params=WRONG)
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def traced(text_ids: list[int], dtype: str) -> tuple[list[int], RequestTrace]:
    """Tokens that were fed, and what the engine kept: the whole prompt in one chunk, nothing pinned."""
    policy = {"budget": BUDGET, "pin_tokens": 0, "trace": True}
    with engine(policy=policy, enable_prefix_caching=False, max_num_batched_tokens=512, dtype=dtype) as llm:
        (completion,) = complete(llm, [text_ids[:PROMPT_TOKENS]], greedy(NEW_TOKENS))
        (trace,) = take_traces(llm)
    assert trace.step_sizes == [PROMPT_TOKENS] + [1] * (NEW_TOKENS - 1)
    return completion.fed_ids, trace


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(
        MODEL, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def by_kv_head(attention: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """``[num_heads, queries, keys]`` summed over each KV head's query heads and over the queries."""
    return attention.double().unflatten(0, (num_kv_heads, -1)).sum(dim=(1, 2))


def halves(scores: torch.Tensor, num_kept: int) -> torch.Tensor:
    """bool ``[H, L]``: the newest ``RECENT`` tokens, and the highest sums among the others."""
    heads, live = scores.shape
    kept = torch.zeros(heads, live, dtype=torch.bool)
    kept[:, live - RECENT :] = True
    heavy = scores[:, : live - RECENT].topk(num_kept - RECENT, dim=1).indices
    return kept.scatter_(1, heavy, True)


@torch.no_grad()
def test_prompt_and_decoding_keep_what_the_paper_says(
    traced: tuple[list[int], RequestTrace], model: Any, dtype: str
) -> None:
    fed, trace = traced
    num_kv_heads = model.config.num_key_value_heads
    layers = range(model.config.num_hidden_layers)
    cache = DynamicCache()
    prompt = torch.tensor([fed[:PROMPT_TOKENS]])
    attentions = model(prompt, past_key_values=cache, output_attentions=True).attentions
    scores = [by_kv_head(attentions[layer][0], num_kv_heads) for layer in layers]
    positions = [torch.arange(PROMPT_TOKENS).expand(num_kv_heads, -1) for _ in layers]
    num_wrong = 0
    num_kept = KEPT
    for event in range(2):
        for layer in layers:
            keep = halves(scores[layer], num_kept)
            ours = trace.kept[event][layer].sort(dim=1).values
            definition = positions[layer][keep].view(num_kv_heads, -1)
            assert ours.shape == definition.shape == (num_kv_heads, num_kept)
            for head in range(num_kv_heads):
                num_wrong += len(set(ours[head].tolist()) ^ set(definition[head].tolist())) // 2
            # The real thing goes on with fewer tokens: so does this cache, head by head.
            of_layer = cache.layers[layer]
            of_layer.keys = of_layer.keys[0][keep].view(1, num_kv_heads, num_kept, -1)
            of_layer.values = of_layer.values[0][keep].view(1, num_kv_heads, num_kept, -1)
            scores[layer] = scores[layer][keep].view(num_kv_heads, -1)
            positions[layer] = definition
        if event:
            break
        # Up to the next full block nothing is dropped; each step adds a token and a row of attention.
        for position in range(PROMPT_TOKENS, (PROMPT_TOKENS // BLOCK + 1) * BLOCK):
            attentions = model(
                torch.tensor([[fed[position]]]),
                past_key_values=cache,
                position_ids=torch.tensor([[position]]),
                output_attentions=True,
            ).attentions
            for layer in layers:
                new = torch.full((num_kv_heads, 1), position)
                positions[layer] = torch.cat([positions[layer], new], dim=1)
                grown = torch.nn.functional.pad(scores[layer], (0, 1))
                scores[layer] = grown + by_kv_head(attentions[layer][0], num_kv_heads)
        num_kept = positions[0].shape[1] - BLOCK
    # Sums that are equal but for rounding may fall either way.
    total = 2 * len(layers) * num_kv_heads * KEPT
    assert num_wrong <= WRONG[dtype] * total, f"{num_wrong} of {total}"
