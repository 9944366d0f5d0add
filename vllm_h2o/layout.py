"""Views of one layer's paged KV cache that hide how a backend lays a block out.

Everything behind this module sees, for every backend,

    keys       [num_blocks, num_kv_heads, head_size, block_size]   cache dtype
    values     [num_blocks, num_kv_heads, block_size, head_size]   cache dtype
    scores     [num_blocks, num_kv_heads, block_size]              float32
    positions  [num_blocks, num_kv_heads, block_size]              int32, only where they are tracked

as strided views of the memory that vLLM allocated: writing through them writes the cache. Where attention
uses AMX, keys and values lie in tiles, which no view of four dimensions can say: there, tensor operations
take ``keys_of``, ``values_of`` and ``move`` (which serve every layout), the native kernels know by
``for_amx``. Scores and positions lie in the padding at the end of each block (``page_size_padded``), so
vLLM's own accounting counts them. vLLM's copies of blocks leave them out (``copy_side``).
"""

from dataclasses import dataclass

import torch

_SLOT_BYTES = 4  # one float32 score, or one int32 position
_TILE = 16  # rows of an AMX tile; a row is 16 pairs


CPU_ISAS = ("vec", "vec16", "amx")
"""vLLM's names of the CPU attention kernels whose layouts are known here."""


def side_bytes_per_block(num_kv_heads: int, block_size: int, *, positions: bool) -> int:
    """Bytes that scores (and positions) add to a block of one layer."""
    return num_kv_heads * block_size * _SLOT_BYTES * (2 if positions else 1)


@dataclass(frozen=True)
class PagedLayer:
    """The four views of one layer; ``positions`` is None unless they are tracked.

    Attributes:
        for_amx: keys are ``[num_blocks, num_kv_heads, head_size / 2, 2, block_size / 16, 16]``, values
            ``[num_blocks, num_kv_heads, block_size / 2, 2, head_size / 16, 16]``: pairs along what attention
            sums over, in tiles of 16 pairs along the rest.
    """

    keys: torch.Tensor
    values: torch.Tensor
    scores: torch.Tensor
    positions: torch.Tensor | None
    for_amx: bool = False

    @property
    def block_size(self) -> int:
        return self.scores.shape[2]

    @property
    def num_kv_heads(self) -> int:
        return self.scores.shape[1]

    @property
    def head_size(self) -> int:
        return self.keys.shape[2] * 2 if self.for_amx else self.keys.shape[2]

    @classmethod
    def from_cpu_cache(cls, kv_cache: torch.Tensor, *, isa: str, positions: bool) -> "PagedLayer":
        """Views of vLLM's CPU layouts (``vllm/v1/attention/backends/cpu_attn.py``, ``csrc/cpu``).

        Args:
            kv_cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]`` with padded blocks. Inside
                a block and head come ``block_size * head_size`` elements of K, then V. "vec" and "vec16"
                store K transposed as ``[head_size, block_size]``, V as ``[block_size, head_size]``; "amx"
                K as ``[block_size / 16, head_size / 2, 16, 2]``, V as
                ``[head_size / 16, block_size / 2, 16, 2]``.
            isa: what vLLM's attention uses.
            positions: whether the padding holds positions behind the scores.
        """
        assert isa in CPU_ISAS, isa
        num_blocks, num_kv_heads, block_size, content = kv_cache.shape
        head_size = content // 2
        keys, values = kv_cache.view(num_blocks, num_kv_heads, 2, block_size * head_size).unbind(2)
        if isa == "amx":
            keys = keys.unflatten(2, (block_size // _TILE, head_size // 2, _TILE, 2))
            values = values.unflatten(2, (head_size // _TILE, block_size // 2, _TILE, 2))
            keys, values = (tiles.permute(0, 1, 3, 5, 2, 4) for tiles in (keys, values))
        else:
            keys = keys.unflatten(2, (head_size, block_size))
            values = values.unflatten(2, (block_size, head_size))
        return cls(keys, values, *_side_views(kv_cache, positions=positions), for_amx=isa == "amx")

    @classmethod
    def from_gpu_cache(cls, kv_cache: torch.Tensor, *, positions: bool) -> "PagedLayer":
        """Views of the layout of FlashAttention and Triton attention (``vllm/v1/attention/backends``).

        Args:
            kv_cache: ``[num_blocks, num_kv_heads, block_size, 2 * head_size]`` with padded blocks; the order
                of heads and slots in memory may be either. A slot holds K, then V.
            positions: whether the padding holds positions behind the scores.
        """
        head_size = kv_cache.shape[3] // 2
        keys, values = kv_cache.split(head_size, dim=3)
        return cls(keys.transpose(2, 3), values, *_side_views(kv_cache, positions=positions))

    def keys_of(self, blocks: torch.Tensor) -> torch.Tensor:
        """Copies ``[..., num_kv_heads, head_size, block_size]``; ``blocks`` is ``[...]`` int64."""
        return self._untiled(self.keys[blocks])

    def values_of(self, blocks: torch.Tensor) -> torch.Tensor:
        """Copies ``[..., num_kv_heads, block_size, head_size]``; ``blocks`` is ``[...]`` int64."""
        return self._untiled(self.values[blocks])

    def _untiled(self, vectors: torch.Tensor) -> torch.Tensor:
        return vectors.flatten(-2).flatten(-3, -2) if self.for_amx else vectors

    def move(
        self,
        heads: torch.Tensor,
        sources: tuple[torch.Tensor, torch.Tensor],
        targets: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Copy key, value, score and position of single tokens.

        Args:
            heads: ``[n]`` int64.
            sources, targets: block ids and offsets inside them, ``[n]`` int64 each.
        """
        (source, begin), (target, end) = sources, targets
        if self.for_amx:
            tiled = (begin // _TILE, begin % _TILE), (end // _TILE, end % _TILE)
            self.keys[target, heads, :, :, *tiled[1]] = self.keys[source, heads, :, :, *tiled[0]]
            paired = (begin // 2, begin % 2), (end // 2, end % 2)
            self.values[target, heads, *paired[1]] = self.values[source, heads, *paired[0]]
        else:
            self.keys[target, heads, :, end] = self.keys[source, heads, :, begin]
            self.values[target, heads, end] = self.values[source, heads, begin]
        for side in (self.scores, self.positions):
            if side is not None:
                side[target, heads, end] = side[source, heads, begin]

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
