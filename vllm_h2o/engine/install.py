"""Hooks into vLLM's engine arguments: the only thing that is changed while no policy is active.

Three methods of ``EngineArgs`` are wrapped once per process. Without ``--kv-policy`` they do what vLLM's
own do; with it, ``create_engine_config`` resolves the policy, refuses what can't work, and selects our
worker, which brings backend, spec and manager with it, and our scheduler, which reports to our metrics.
"""

import argparse
import functools
from typing import Any

from vllm_h2o.config import CONFIG_KEY, KVPolicyConfig
from vllm_h2o.engine import backend, cli
from vllm_h2o.engine.compat import EngineArgs, VllmConfig, current_platform, init_logger
from vllm_h2o.engine.refusals import CPU_BLOCK_MULTIPLE, refuse_engine, refuse_small_pool
from vllm_h2o.errors import ConfigError
from vllm_h2o.settings import KVPolicySettings

logger = init_logger("vllm.h2o")

WORKER = "vllm_h2o.engine.worker.H2OCPUWorker"
GPU_WORKER = "vllm_h2o.engine.gpu.worker.H2OGPUWorker"
SCHEDULER = "vllm_h2o.engine.scheduler.H2OScheduler"
ASYNC_SCHEDULER = "vllm_h2o.engine.scheduler.H2OAsyncScheduler"
_MARK = "__vllm_h2o__"


def install() -> None:
    """Wrap the three methods; a second call changes nothing."""
    if hasattr(EngineArgs.create_engine_config, _MARK):
        return
    EngineArgs.add_cli_args = staticmethod(_wrap_add_cli_args(EngineArgs.add_cli_args))
    EngineArgs.from_cli_args = classmethod(_wrap_from_cli_args(EngineArgs.from_cli_args.__func__))
    EngineArgs.create_engine_config = _wrap_create_engine_config(EngineArgs.create_engine_config)


def _wrap_add_cli_args(original: Any) -> Any:
    @functools.wraps(original)
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = original(parser)
        cli.add_flags(parser)
        return parser

    return add_cli_args


def _wrap_from_cli_args(original: Any) -> Any:
    @functools.wraps(original)
    def from_cli_args(cls: type[EngineArgs], args: argparse.Namespace) -> EngineArgs:
        engine_args: EngineArgs = original(cls, args)
        engine_args.additional_config = cli.with_flags(engine_args.additional_config, args)
        # Where there are several API servers, each of their processes reads these arguments again, and loads
        # plugins only while it does: what is here by then it will find.
        args.additional_config = engine_args.additional_config
        return engine_args

    return from_cli_args


def _wrap_create_engine_config(original: Any) -> Any:
    @functools.wraps(original)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        written = KVPolicySettings.from_additional_config(self.additional_config)
        settings = KVPolicySettings.merge(KVPolicySettings(), written)
        if settings.name is None:
            KVPolicySettings.require_name(self.additional_config)
            backend.deactivate()
            return original(self, *args, **kwargs)
        given = self.block_size
        if given is None and current_platform.is_cpu():
            # vLLM's own default there, 128, would make budgets coarse.
            self.block_size = CPU_BLOCK_MULTIPLE
        try:
            vllm_config = original(self, *args, **kwargs)
        finally:
            self.block_size = given  # these arguments may make another engine, one without a policy
        return apply_policy(vllm_config, settings)

    setattr(create_engine_config, _MARK, True)
    return create_engine_config


def apply_policy(vllm_config: VllmConfig, settings: KVPolicySettings) -> VllmConfig:
    """Put the resolved policy into ``vllm_config`` and select our worker.

    Raises:
        ConfigError: a setting is out of range.
        RefusedError: the engine or the model has features that eviction can't serve.
    """
    try:
        policy, notes = settings.resolve(
            max_model_len=vllm_config.model_config.max_model_len,
            block_size=vllm_config.cache_config.block_size,
            max_in_flight_tokens=vllm_config.max_in_flight_tokens,
        )
    except ConfigError as error:
        refuse_engine(vllm_config, settings, error)
        raise
    refuse_engine(vllm_config, settings, None)
    refuse_small_pool(vllm_config, policy)
    for note in notes:
        logger.warning("KV policy: %s.", note)
    # Not at the top: it brings much of vLLM's front end, which nobody else has to load.
    from vllm_h2o.engine import metrics, request_checks

    _set_policy(vllm_config, policy)
    metrics.install()
    request_checks.install(policy)
    backend.activate()
    return vllm_config


def _set_policy(vllm_config: VllmConfig, policy: KVPolicyConfig) -> None:
    # A new dict: the old one belongs to the caller's EngineArgs and may be used for another engine.
    vllm_config.additional_config = {
        **vllm_config.additional_config,
        CONFIG_KEY: policy.to_dict(),
    }
    vllm_config.parallel_config.worker_cls = GPU_WORKER if current_platform.is_cuda() else WORKER
    scheduler_config = vllm_config.scheduler_config
    scheduler_config.scheduler_cls = ASYNC_SCHEDULER if scheduler_config.async_scheduling else SCHEDULER
