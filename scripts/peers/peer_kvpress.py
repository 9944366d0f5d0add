"""kvpress: ObservedAttentionPress, its relative of H2O, on Transformers' ``generate``.

After the prompt's attention the cache is cut to the budget, once per layer. "Decoding too" also cuts it back
to the budget after every block of output, by the attention of the newest query alone (DecodingPress keeps no
older scores). Both need the attention written out as a matrix, which is Transformers' `eager` implementation.
"""

from __future__ import annotations

from typing import Any

from kvpress import DecodingPress, ObservedAttentionPress, PrefillDecodingPress

import peer_protocol
import static_batches
from peer_protocol import Phases
from peer_workload import BLOCK_TOKENS, Task, Workload


def press(workload: Workload, decoding: bool) -> Any:
    """The press that leaves the workload's budget of its prompts."""
    kept = min(1.0, workload.budget_tokens / workload.prompt_tokens)
    prefill = ObservedAttentionPress(compression_ratio=1 - kept)
    if not decoding:
        return prefill
    return PrefillDecodingPress(
        prefilling_press=prefill,
        decoding_press=DecodingPress(
            base_press=ObservedAttentionPress(),
            # As often as the plugin: it frees one block when a block of tokens came in.
            compression_interval=BLOCK_TOKENS,
            target_size=workload.budget_tokens,
            hidden_states_buffer_size=0,  # scores come from attention, not from hidden states
        ),
    )


def measure(task: Task) -> tuple[list[Phases], dict[str, Any]]:
    """Run the task; its phases, and the KV tokens that a request ended with."""
    model = static_batches.load(task, attention="eager")
    decoding = task.variant.method.endswith("decoding too")
    phases, kept = static_batches.run(task, model, lambda: press(task.workload, decoding)(model))
    return phases, {"kv_tokens_per_request": kept}


if __name__ == "__main__":
    peer_protocol.main(measure, ["kvpress", "transformers", "torch"])
