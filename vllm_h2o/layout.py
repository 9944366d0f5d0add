"""Views of one layer's paged KV cache that hide how a backend lays a block out.

Everything behind this module sees, for every backend,

    keys       [num_blocks, num_kv_heads, head_size, block_size]   cache dtype
    values     [num_blocks, num_kv_heads, block_size, head_size]   cache dtype
    scores     [num_blocks, num_kv_heads, block_size]              float32
    positions  [num_blocks, num_kv_heads, block_size]              int32, only where they are tracked

as strided views of the memory that vLLM allocated: writing through them writes the cache. Scores and
positions lie in the padding at the end of each block (``page_size_padded``), so vLLM's own accounting
counts them. vLLM's copies of blocks leave them out (``copy_side``).
"""

from dataclasses import dataclass

import torch

_SLOT_BYTES = 4  # one float32 score, or one int32 position


def side_bytes_per_block(num_kv_heads: int, block_size: int, *, positions: bool) -> int:
    """Bytes that scores (and positions) add to a block of one layer."""
    return num_kv_heads * block_size * _SLOT_BYTES * (2 if positions else 1)


@dataclass(frozen=True)
class PagedLayer:
    """The four views of one layer; ``positions`` is None unless they are tracked."""

    keys: torch.Tensor
    values: torch.Tensor
    scores: torch.Tensor
    positions: torch.Tensor | None

    @property
    def block_size(self) -> int:
        return self.scores.shape[2]

    @classmethod
    def from_cpu_cache(cls, kv_cache: torch.Tensor, *, positions: bool) -> "PagedLayer":
        """Views of vLLM's CPU "vec" layout (``vllm/v1/attention/backends/cpu_attn.py``).

        Args:
            kv_cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]`` with padded blocks. Inside
                a block and head come ``block_size * head_size`` elements of K, stored transposed as
                ``[head_size, block_size]``, then V as ``[block_size, head_size]``.
            positions: whether the padding holds positions behind the scores.
        """
        num_blocks, num_kv_heads, block_size, content = kv_cache.shape
        head_size = content // 2
        interleaved = kv_cache.view(num_blocks, num_kv_heads, 2, block_size * head_size)
        scores, tracked = _side_views(kv_cache, positions=positions)
        return cls(
            keys=interleaved[:, :, 0].unflatten(2, (head_size, block_size)),
            values=interleaved[:, :, 1].unflatten(2, (block_size, head_size)),
            scores=scores,
            positions=tracked,
        )

    @classmethod
    def from_gpu_cache(cls, kv_cache: torch.Tensor, *, positions: bool) -> "PagedLayer":
        """Views of the layout of FlashAttention and Triton attention (``vllm/v1/attention/backends``).

        Args:
            kv_cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]`` with padded blocks; the order
                of heads and slots in memory may be either. A slot holds K, then V.
            positions: whether the padding holds positions behind the scores.
        """
        head_size = kv_cache.shape[3] // 2
        scores, tracked = _side_views(kv_cache, positions=positions)
        keys, values = kv_cache.split(head_size, dim=3)
        return cls(keys=keys.transpose(2, 3), values=values, scores=scores, positions=tracked)

    def start_blocks(self, block_ids: torch.Tensor, positions: torch.Tensor) -> None:
        """Reset blocks that get their first token in this step.

        Args:
            block_ids: ``[n]`` int64.
            positions: ``[n, block_size]`` int32, positions of the tokens that their slots will hold.
        """
        self.scores[block_ids] = 0
        if self.positions is not None:
            self.positions[block_ids] = positions[:, None]

    def copy_side(self, sources: torch.Tensor, copies: torch.Tensor, *, scores: bool) -> None:
        """Do for scores and positions what vLLM is about to do for keys and values of copied blocks.

        Args:
            sources, copies: ``[n]`` int64 block ids.
            scores: copy the scores; otherwise both begin without any, whatever vLLM copies along.
        """
        if self.positions is not None:
            self.positions[copies] = self.positions[sources]
        if scores:
            self.scores[copies] = self.scores[sources]
        else:
            self.scores[sources] = self.scores[copies] = 0


def _side_views(kv_cache: torch.Tensor, *, positions: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    num_blocks, num_kv_heads, block_size, content = kv_cache.shape
    used_bytes = num_kv_heads * block_size * content * kv_cache.element_size()
    block_bytes = kv_cache.stride(0) * kv_cache.element_size()
    needed = side_bytes_per_block(num_kv_heads, block_size, positions=positions)
    assert block_bytes >= used_bytes + needed, (
        f"blocks of {block_bytes} bytes have no room for {needed} bytes behind {used_bytes}"
    )
    first = int(kv_cache.storage_offset()) * kv_cache.element_size() + used_bytes
    assert first % _SLOT_BYTES == 0 and block_bytes % _SLOT_BYTES == 0

    def view(dtype: torch.dtype, offset_bytes: int) -> torch.Tensor:
        flat = torch.empty(0, dtype=dtype, device=kv_cache.device).set_(kv_cache.untyped_storage())
        return flat.as_strided(
            (num_blocks, num_kv_heads, block_size),
            (block_bytes // _SLOT_BYTES, block_size, 1),
            int(offset_bytes // _SLOT_BYTES),
        )

    scores = view(torch.float32, first)
    if not positions:
        return scores, None
    return scores, view(torch.int32, first + num_kv_heads * block_size * _SLOT_BYTES)
