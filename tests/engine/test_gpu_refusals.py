"""GPUs: refused unless asked for, and then only where the kernels can work. The platform here is made up."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import FullAttentionSpec

from tests.engines import MODEL
from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.engine import backend, install, refusals
from vllm_h2o.engine.compat import CPU_WORKER, GPU_WORKER
from vllm_h2o.engine.gpu import refusals as gpu_refusals
from vllm_h2o.engine.gpu.backend import H2OFlashAttentionBackend, H2OTritonAttentionBackend
from vllm_h2o.errors import RefusedError
from vllm_h2o.settings import KVPolicySettings

WRAPPED = {
    AttentionBackendEnum.FLASH_ATTN: H2OFlashAttentionBackend,
    AttentionBackendEnum.TRITON_ATTN: H2OTritonAttentionBackend,
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    platform = SimpleNamespace(
        is_cuda=lambda: True,
        is_cpu=lambda: False,
        device_name="cuda",
        capability=DeviceCapability(9, 0),
        get_device_capability=lambda: platform.capability,
    )
    for module in (backend, install, refusals, gpu_refusals):
        monkeypatch.setattr(module, "current_platform", platform)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    yield platform
    for member in WRAPPED:
        member.clear_override()


def configuration(**options: Any) -> VllmConfig:
    """vLLM's, as it would be on a GPU."""
    vllm_config: VllmConfig = EngineArgs(MODEL, max_model_len=1024, **options).create_engine_config()
    vllm_config.cache_config.block_size = 16
    vllm_config.parallel_config.worker_cls = GPU_WORKER
    return vllm_config


@pytest.fixture
def vllm_config(gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> VllmConfig:
    """Made while the platform is what it is: vLLM's own one looks at its environment."""
    with monkeypatch.context() as real:
        real.delenv("VLLM_USE_V2_MODEL_RUNNER")
        return configuration()


def settings(**changes: Any) -> KVPolicySettings:
    return KVPolicySettings(**{"name": "h2o", "budget": 256, "kernels": "triton", **changes})


def reasons(vllm_config: VllmConfig, **changes: Any) -> str:
    with pytest.raises(RefusedError) as error:
        install.apply_policy(vllm_config, settings(**changes))
    assert len(error.value.refusals) == 1, error.value
    return str(error.value)


def test_who_asks_for_triton_gets_our_worker_and_backends(vllm_config: VllmConfig) -> None:
    path = AttentionBackendEnum.CPU_ATTN.get_path()
    install.apply_policy(vllm_config, settings())
    assert vllm_config.parallel_config.worker_cls == install.GPU_WORKER
    policy = KVPolicyConfig.from_additional_config(vllm_config.additional_config)
    assert policy is not None
    assert (policy.kernels, policy.block_size) == ("triton", 16)
    assert backend.is_active()
    for member, ours in WRAPPED.items():
        assert member.get_class() is ours
        assert ours.get_name() == member.name
        assert backend.is_ours(ours)
        assert not backend.is_ours(ours.__mro__[2])
    assert AttentionBackendEnum.CPU_ATTN.get_path() == path
    backend.deactivate()
    assert not backend.is_active()
    for member, ours in WRAPPED.items():
        assert not member.is_overridden()
        assert issubclass(ours, member.get_class())


@pytest.mark.parametrize("kernels", [None, "auto", "native", "torch"])
def test_not_asked_for(vllm_config: VllmConfig, kernels: str | None) -> None:
    message = reasons(vllm_config, kernels=kernels)
    for words in ("not run on a GPU yet", "found: cuda", 'kernels: triton in additional_config["kv_policy"]'):
        assert words in message
    assert not backend.is_active()


def test_old_gpus(vllm_config: VllmConfig, gpu: SimpleNamespace) -> None:
    gpu.capability = DeviceCapability(7, 5)
    assert "compute capability below 8.0 (found: 7.5)" in reasons(vllm_config)


def test_v1_model_runner(vllm_config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert "Set VLLM_USE_V2_MODEL_RUNNER=1." in reasons(vllm_config)


@pytest.mark.parametrize(("block_size", "fix"), [(48, "Use 64"), (256, "Use 128")])
def test_block_sizes(vllm_config: VllmConfig, block_size: int, fix: str) -> None:
    vllm_config.cache_config.block_size = block_size
    message = reasons(vllm_config, budget=768)
    assert f"--block-size {block_size}" in message
    assert fix in message


def test_trace(vllm_config: VllmConfig) -> None:
    assert "traces on GPUs" in reasons(vllm_config, trace=True)


def test_microbatches(vllm_config: VllmConfig) -> None:
    vllm_config.parallel_config.enable_dbo = True
    assert "--enable-dbo" in reasons(vllm_config)


def test_reference_windows(vllm_config: VllmConfig) -> None:
    vllm_config.model_config.model_arch_config.rswa_window = 128
    assert "rswa_window 128" in reasons(vllm_config)


def test_custom_workers(vllm_config: VllmConfig) -> None:
    vllm_config.parallel_config.worker_cls = CPU_WORKER
    assert f"--worker-cls {CPU_WORKER}" in reasons(vllm_config)


@pytest.mark.parametrize("member", WRAPPED)
def test_other_plugins(vllm_config: VllmConfig, member: AttentionBackendEnum) -> None:
    register_backend(member, "theirs.Backend")
    assert "found: theirs.Backend" in reasons(vllm_config)


def test_all_reasons_at_once(vllm_config: VllmConfig, gpu: SimpleNamespace) -> None:
    gpu.capability = DeviceCapability(7, 0)
    vllm_config.cache_config.block_size = 256
    with pytest.raises(RefusedError) as error:
        install.apply_policy(vllm_config, settings(kernels=None, budget=768, trace=True))
    assert len(error.value.refusals) == 4


def test_other_platforms(vllm_config: VllmConfig, gpu: SimpleNamespace) -> None:
    gpu.is_cuda = lambda: False
    assert "platforms other than x86-64 CPUs and NVIDIA GPUs" in reasons(vllm_config)


def test_triton_on_a_cpu() -> None:
    policy = {"kv_policy": {"name": "h2o", "budget": 256, "kernels": "triton"}}
    with pytest.raises(RefusedError, match=r"Triton kernels on CPU .* Use auto, native or torch"):
        EngineArgs(MODEL, max_model_len=1024, additional_config=policy).create_engine_config()


def layer(attn_backend: type, head_size: int = 64, head_size_v: int = 64) -> Any:
    """A loaded layer, as far as refusals look at it."""
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=head_size, head_size_v=head_size_v, dtype=torch.bfloat16
    )
    loaded = Attention.__new__(Attention)
    torch.nn.Module.__init__(loaded)
    loaded.__dict__.update(
        kv_sharing_target_layer_name=None, attn_type="decoder", impl=None, attn_backend=attn_backend,
        head_size=head_size, get_kv_cache_spec=lambda _: spec,
    )  # fmt: skip
    return loaded


@pytest.mark.parametrize(
    ("loaded", "words"),
    [
        (lambda: layer(AttentionBackendEnum.CPU_ATTN.get_class()), "FLASH_ATTN or TRITON_ATTN"),
        (lambda: layer(H2OFlashAttentionBackend, 512, 512), "more than 256 numbers"),
        (lambda: layer(H2OTritonAttentionBackend, 64, 32), "64 and 32"),
        (lambda: layer(H2OTritonAttentionBackend), None),
    ],
    ids=["backend", "head size", "two sizes", "none"],
)
def test_loaded_layers(vllm_config: VllmConfig, loaded: Any, words: str | None) -> None:
    policy, _ = settings().resolve(max_model_len=1024, block_size=16, max_in_flight_tokens=256)
    vllm_config.compilation_config.static_forward_context["a"] = loaded()
    if words is None:
        refusals.refuse_model(vllm_config, policy)
        return
    with pytest.raises(RefusedError) as error:
        refusals.refuse_model(vllm_config, policy)
    assert words in str(error.value)
