"""What can't be served is refused at start-up, every reason in one error, each with value and fix.

Most reasons show in the configuration: for these a directory with nothing but a config.json is enough, read
by vLLM's own ``create_engine_config``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from vllm.engine.arg_utils import EngineArgs

from tests.engines import MODEL, engine
from tests.tiny_models import CONFIGS, save
from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.engine import install
from vllm_h2o.engine.refusals import refuse_small_memory
from vllm_h2o.errors import ConfigError, RefusedError

POLICY = {"kv_policy": {"name": "h2o", "budget": 256}}
TINY = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def configure(model: Path | str, **options: Any) -> KVPolicyConfig:
    """vLLM's configuration of an engine that is never started."""
    arguments = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 1024, **options}
    vllm_config = EngineArgs(str(model), additional_config=POLICY, **arguments).create_engine_config()
    policy = KVPolicyConfig.from_additional_config(vllm_config.additional_config)
    assert policy is not None
    return policy


def config_only(directory: Path, config: transformers.PretrainedConfig, architecture: str) -> Path:
    config.architectures = [architecture]
    config.save_pretrained(directory)
    return directory


@pytest.mark.parametrize(
    ("options", "found", "fix"),
    [
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
            "ngram",
            "--speculative-config",
        ),
        ({"kv_cache_dtype": "fp8"}, "fp8", "--kv-cache-dtype auto"),
        ({"worker_cls": "vllm.v1.worker.worker_base.WorkerBase"}, "WorkerBase", "Drop it"),
        ({"kv_offloading_size": 1.0}, "1.0 GiB", "--kv-offloading-size"),
        (
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            "ExampleConnector",
            "--kv-transfer-config",
        ),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2", "--tensor-parallel-size"),
        ({"block_size": 48}, "--block-size 48", "Use 64"),
    ],
    ids=["speculative", "quantised-kv", "worker", "offloading", "connector", "pipeline", "block-size"],
)
def test_engine_features(options: dict[str, Any], found: str, fix: str) -> None:
    with pytest.raises(RefusedError) as error:
        configure(MODEL, **options)
    assert found in str(error.value)
    assert fix in str(error.value)


def test_all_reasons_at_once() -> None:
    with pytest.raises(RefusedError) as error:
        configure(
            MODEL,
            kv_cache_dtype="fp8",
            speculative_config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3},
            worker_cls="vllm.v1.worker.worker_base.WorkerBase",
        )
    assert len(error.value.refusals) == 3
    for found in ("fp8", "ngram", "WorkerBase"):
        assert found in str(error.value)


def test_a_bad_setting_is_listed_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(POLICY, "kv_policy", {"name": "h2o", "budget": 40})
    with pytest.raises(RefusedError, match="--kv-budget") as error:
        configure(MODEL, kv_cache_dtype="fp8")
    assert len(error.value.refusals) == 2
    assert "at least 96" in str(error.value)


@pytest.mark.parametrize("blocks", [2, 17])
def test_a_pool_too_small_for_one_request(blocks: int) -> None:
    """vLLM's own message advises on context and memory, which is not what counts here."""
    with pytest.raises(ConfigError) as error:
        configure(MODEL, num_gpu_blocks_override=blocks, max_num_batched_tokens=256)
    message = str(error.value)
    assert message.startswith(f"--num-gpu-blocks-override={blocks}: one request needs up to 17 blocks of 32")
    assert "--kv-budget 256 and --max-num-batched-tokens" in message
    assert message.endswith("Give at least 18, or lower those")


def test_the_smallest_pool_is_accepted() -> None:
    configure(MODEL, num_gpu_blocks_override=18, max_num_batched_tokens=256)


def test_memory_too_small_for_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory given, what one request needs, what is left of it, and how much is missing."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)  # would win over the argument
    arguments = EngineArgs(MODEL, additional_config=POLICY, max_model_len=1024, kv_cache_memory_bytes=900)
    vllm_config = arguments.create_engine_config()
    policy = KVPolicyConfig.from_additional_config(vllm_config.additional_config)
    assert policy is not None
    refuse_small_memory(vllm_config, policy, needed=700, available=700)
    with pytest.raises(ConfigError) as error:
        refuse_small_memory(vllm_config, policy, needed=701, available=600)
    message = str(error.value)
    assert message.startswith("--kv-cache-memory-bytes=900: one request needs up to ")
    assert "701 bytes; beside kept queries and scoring 600 are left. Give 101 bytes more" in message


def test_plain_model_is_accepted() -> None:
    assert configure(MODEL).budget_tokens == 256


_CONFIGURATIONS = {
    "ALiBi": (
        "BloomForCausalLM",
        lambda: transformers.BloomConfig(vocab_size=512, hidden_size=128, n_layer=2, n_head=4),
    ),
    "MLA": (
        "DeepseekV2ForCausalLM",
        lambda: transformers.DeepseekV2Config(
            **TINY,
            num_key_value_heads=4,
            kv_lora_rank=32,
            q_lora_rank=None,
            qk_rope_head_dim=32,
            qk_nope_head_dim=32,
            v_head_dim=32,
            intermediate_size=128,
            moe_intermediate_size=64,
            n_routed_experts=2,
            num_experts_per_tok=1,
        ),
    ),
    "state-space": (
        "JambaForCausalLM",
        lambda: transformers.JambaConfig(
            **TINY, num_key_value_heads=2, intermediate_size=128, attn_layer_period=2, attn_layer_offset=1
        ),
    ),
    "without attention": (
        "MambaForCausalLM",
        lambda: transformers.MambaConfig(vocab_size=512, hidden_size=128, num_hidden_layers=2),
    ),
}


@pytest.mark.parametrize("reason", list(_CONFIGURATIONS))
def test_model_configurations(reason: str, tmp_path: Path) -> None:
    architecture, config = _CONFIGURATIONS[reason]
    model = config_only(tmp_path, config(), architecture)
    with pytest.raises(RefusedError, match=reason) as error:
        configure(model)
    assert "without --kv-policy" in str(error.value)


def test_pooling_model(tmp_path: Path) -> None:
    model = config_only(tmp_path, CONFIGS["llama-gqa"](), "LlamaForCausalLM")
    with pytest.raises(RefusedError, match="pooling"):
        configure(model, runner="pooling")


@pytest.mark.parametrize("model", ["gemma3-sliding-first", "gemma3-full-first"])
def test_sliding_window_without_hybrid_manager(model: str, tmp_path: Path) -> None:
    options = {"skip_tokenizer_init": True, "disable_hybrid_kv_cache_manager": True}
    with (
        pytest.raises(RefusedError, match="without vLLM's hybrid KV cache manager"),
        engine(str(save(model, tmp_path)), policy={"budget": 256}, **options),
    ):
        pass


def test_quantised_kv_cache_that_only_the_checkpoint_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints with KV cache scales set the layers' dtype while the configuration still says auto."""
    monkeypatch.setattr(install, "refuse_engine", lambda *_: None)
    options = {"skip_tokenizer_init": True, "kv_cache_dtype": "fp8"}
    with (
        pytest.raises(RefusedError, match="quantised KV caches") as error,
        engine(str(save("llama-gqa", tmp_path)), policy={"budget": 256}, **options),
    ):
        pass
    assert len(error.value.refusals) <= 2, "one line a reason, however many layers have it"


def test_no_full_attention_layer(tmp_path: Path) -> None:
    """Only the loaded layers show this."""
    config = transformers.MistralConfig(
        **TINY, num_key_value_heads=2, intermediate_size=128, sliding_window=64, max_position_embeddings=2048
    )
    model = save("mistral-sliding-only", tmp_path, config=config)
    with (
        pytest.raises(RefusedError, match="no full-attention layer"),
        engine(str(model), policy={"budget": 256}, skip_tokenizer_init=True),
    ):
        pass


def test_alibi_in_the_loaded_layers(tmp_path: Path) -> None:
    """A model whose configuration doesn't give ALiBi away; its attention layers do."""
    config = transformers.FalconConfig(
        **TINY, num_kv_heads=4, new_decoder_architecture=True, bias=False, parallel_attn=True
    )
    config.alibi = True
    with pytest.raises(RefusedError, match="ALiBi"):
        configure(config_only(tmp_path, config, "FalconForCausalLM"))
