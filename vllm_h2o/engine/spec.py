"""KV cache spec of an evicting layer: a full-attention cache whose requests are bounded.

Importing this module registers the spec with vLLM. Specs travel from the workers to the scheduler by
pickle, and unpickling one imports this module, so the scheduler's process knows the manager exactly when a
worker uses it.
"""

from dataclasses import dataclass, fields, replace
from typing import Self

from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.engine.compat import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheSpecRegistry,
    VllmConfig,
)
from vllm_h2o.engine.manager import H2OManager
from vllm_h2o.layout import side_bytes_per_block


@dataclass(frozen=True, kw_only=True)
class H2OSpec(FullAttentionSpec):
    """``FullAttentionSpec`` plus the policy; blocks are padded to hold scores.

    Attributes:
        policy: the resolved configuration; its ``block_size`` is the cache's own.
    """

    policy: KVPolicyConfig

    def __post_init__(self) -> None:
        super().__post_init__()
        # Whoever changes the block size or the padding (vLLM does both, to make the pages of hybrid models
        # equal) gets a page that still has room for the scores.
        needed = self.unpadded_page_size_bytes + self.side_bytes
        object.__setattr__(self, "page_size_padded", max(self.page_size_padded or 0, needed))

    @property
    def side_bytes(self) -> int:
        """Bytes of a block that hold scores and positions."""
        if not self.policy.compacts:
            return 0
        return side_bytes_per_block(
            self.num_kv_heads, self.block_size, positions=self.policy.tracks_positions
        )

    @classmethod
    def from_full_attention(cls, spec: FullAttentionSpec, policy: KVPolicyConfig) -> Self:
        values = {field.name: getattr(spec, field.name) for field in fields(spec) if field.init}
        return cls(**values, policy=policy)

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """What one request of ``max_model_len`` needs; this lets ``max_model_len`` exceed the pool."""
        # vLLM asks with shorter lengths, too, to find the longest that fits.
        max_model_len = min(self.policy.max_model_len, vllm_config.model_config.max_model_len)
        fitted = replace(self.policy, max_model_len=max_model_len)
        return fitted.max_blocks_per_request * self.page_size_bytes

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """One spec for layers that share a group; they must agree in everything."""
        # vLLM asks by trying, and takes an AssertionError for no.
        assert all(spec == specs[0] for spec in specs), "layers of one KV cache group differ"
        return specs[0]


# Registering before vLLM's own specs would make it skip those.
KVCacheSpecRegistry.check_kv_cache_spec_registry({})
KVCacheSpecRegistry.register(H2OSpec, H2OManager, uniform_type_base_spec=FullAttentionSpec)


def evicting(spec: AttentionSpec, policy: KVPolicyConfig) -> AttentionSpec:
    """The spec of a layer under ``policy``: full-attention layers get ours, all others keep their own."""
    if type(spec) is not FullAttentionSpec or spec.sliding_window is not None or not policy.evicts:
        return spec
    return H2OSpec.from_full_attention(spec, policy)
