"""Names of vLLM that the tests use and that 0.33 has in other places than 0.32."""

try:
    from vllm.v1.core.kv_cache_planning import (
        get_kv_cache_config_from_groups,
        get_kv_cache_groups,
        is_kv_cache_spec_uniform,
    )
except ModuleNotFoundError:  # 0.32
    from vllm.v1.core.kv_cache_utils import (
        get_kv_cache_config_from_groups,
        get_kv_cache_groups,
        is_kv_cache_spec_uniform,
    )

__all__ = ["get_kv_cache_config_from_groups", "get_kv_cache_groups", "is_kv_cache_spec_uniform"]
