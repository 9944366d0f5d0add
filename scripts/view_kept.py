#!/usr/bin/env python3
"""Shows which tokens a policy kept: one self-contained HTML page from a prompt and a configuration.

    python scripts/view_kept.py --prompt-file README.md --kv-policy h2o --kv-budget 256 --out kept.html

The prompt is run through a real engine with the same flags as `vllm serve`. The page shows the text with each
token shaded by how many (layer, head) pairs still kept it at the end, for all layers or one, and the scores.
Run it in the project's environment.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import fetch_model

PAGE = Path(__file__).with_name("view_page.html")
_MARK = "/*DATA*/"

Kept = list[tuple[int, str, list[list[int]], list[list[float]]]]
"""Of a trace: step, layer, and per head the positions and scores that a compaction left."""


def page(data: dict[str, Any]) -> str:
    """The page with its data inside."""
    # "</" would end the script element that holds it.
    return PAGE.read_text(encoding="utf-8").replace(_MARK, json.dumps(data).replace("</", "<\\/"))


def page_data(
    pieces: list[str], num_prompt_tokens: int, steps: list[tuple[int, int, int]], kept: Kept, about: str
) -> dict[str, Any]:
    """What the page shows, from the trace of one request.

    Args:
        pieces: the text of each token.
        steps: ``(first block, computed tokens, new tokens)`` of each step.

    Raises:
        ValueError: nothing was dropped.
    """
    if not kept:
        raise ValueError(
            f"nothing was dropped from {len(pieces)} tokens. Give a lower --kv-budget or a longer prompt."
        )
    last = max(step for step, *_ in kept)
    _, computed, new = steps[last]
    layers: list[int] = []
    counts: list[list[int]] = []
    scores: list[list[float | None]] = []
    for step, name, positions, head_scores in kept:
        if step != last:
            continue
        layers.append(int(re.search(r"\.(\d+)\.", name)[1]))  # type: ignore[index]
        # What came after the last compaction is still there.
        counts.append([0] * (computed + new) + [len(positions)] * (len(pieces) - computed - new))
        sums = [0.0] * len(pieces)
        for of_head, of_scores in zip(positions, head_scores, strict=True):
            for position, score in zip(of_head, of_scores, strict=True):
                counts[-1][position] += 1
                sums[position] += score
        known = computed + new if any(sums) else 0
        scores.append(
            [sums[i] / counts[-1][i] if i < known and counts[-1][i] else None for i in range(len(pieces))]
        )
    return {
        "about": about,
        "tokens": pieces,
        "num_prompt_tokens": num_prompt_tokens,
        "num_heads": len(positions),
        "layers": layers,
        "kept": counts,
        "scores": scores,
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the prompt through an engine and collect the page's data."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM, SamplingParams

    from vllm_h2o.engine import cli

    settings = cli.with_flags({}, options)["kv_policy"]
    llm = LLM(
        str(options.model),
        dtype="float32",
        enforce_eager=True,
        max_model_len=options.max_model_len,
        kv_cache_memory_bytes=2**30,
        max_num_seqs=1,
        enable_prefix_caching=False,
        additional_config={"kv_policy": {**settings, "trace": True}},
    )
    tokenizer = llm.get_tokenizer()
    ids = tokenizer.encode(options.prompt_file.read_text(encoding="utf-8"))
    params = SamplingParams(temperature=0, max_tokens=options.new_tokens)
    (output,) = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    pieces = [tokenizer.decode([token]) for token in [*ids, *output.outputs[0].token_ids]]
    ((trace,),) = llm.collective_rpc("take_kv_trace")
    words = ", ".join(f"{name} {value}" for name, value in settings.items() if name != "name")
    about = f"{options.model.name}, {settings['name']}: {words}; {len(ids)} + {len(pieces) - len(ids)} tokens"
    return page_data(pieces, len(ids), trace["steps"], trace["kept"], about)


def main() -> int:
    """Run the command line and return its exit status."""
    from vllm_h2o.engine import cli

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompt-file", type=Path, required=True, help="text that the model reads")
    parser.add_argument("--new-tokens", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--max-model-len", type=int, default=4096, help="default: %(default)s")
    parser.add_argument("--model", type=Path, default=fetch_model.DEFAULT_TARGET)
    parser.add_argument("--out", type=Path, default=Path("kept.html"), help="default: %(default)s")
    cli.add_flags(parser)
    options = parser.parse_args()
    try:
        if getattr(options, "kv_policy", None) is None:
            raise ValueError("--kv-policy is missing: without one everything is kept")
        options.out.write_text(page(run(options)), encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
