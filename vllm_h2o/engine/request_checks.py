"""Checks in the front end of what a request asks of the policy: nothing that is wrong reaches the engine.

Two of vLLM's functions are wrapped once per process, when a policy is activated. Values alone are checked
where the parameters are made, which over HTTP is before a stream has begun, so that the answer is a 400 then,
too; what depends on the prompt's length is checked where that is known.
"""

import functools
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.engine.input_processor import InputProcessor

from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.engine import backend
from vllm_h2o.engine.compat import VllmConfig, current_platform
from vllm_h2o.engine.metrics import count_refused_request
from vllm_h2o.engine.seams import REQUEST_SEAMS, check_seams
from vllm_h2o.errors import ConfigError
from vllm_h2o.request_limits import NO_POLICY, POLICY, RequestLimits

_MARK = "__vllm_h2o__"
_policy: KVPolicyConfig | None = None
"""Of the engine that was configured last; a server has only one."""


def install(policy: KVPolicyConfig) -> None:
    """Check what is asked of ``policy``, until an engine without one is configured in this process."""
    global _policy
    _policy = policy
    if hasattr(InputProcessor.process_inputs, _MARK):
        return
    check_seams(REQUEST_SEAMS)
    SamplingParams.from_optional = staticmethod(_wrap_from_optional(SamplingParams.from_optional))
    InputProcessor.process_inputs = _wrap_process_inputs(InputProcessor.process_inputs)


def _wrap_from_optional(original: Any) -> Any:
    @functools.wraps(original)
    def from_optional(*args: Any, **kwargs: Any) -> SamplingParams:
        params = original(*args, **kwargs)
        if _policy is not None and params.extra_args and backend.is_active():
            _limits(params.extra_args, _policy)
        return params

    return from_optional


def _wrap_process_inputs(original: Any) -> Any:
    @functools.wraps(original)
    def process_inputs(self: InputProcessor, *args: Any, **kwargs: Any) -> Any:
        request = original(self, *args, **kwargs)
        policy = KVPolicyConfig.from_additional_config(self.vllm_config.additional_config)
        params = request.sampling_params
        if policy is not None and params is not None and params.extra_args:
            limits = _limits(params.extra_args, policy)
            if limits.budget_tokens == policy.no_budget_tokens and policy.evicts:
                prompt = length_from_prompt_token_ids_or_embeds(
                    request.prompt_token_ids, request.prompt_embeds
                )
                longest = min(prompt + params.max_tokens, policy.max_model_len)
                _check_pool(longest, policy, self.vllm_config)
        if policy is not None and request.resumable:
            _check_session(params, policy)
        return request

    setattr(process_inputs, _MARK, True)
    return process_inputs


def _limits(extra_args: dict[str, Any], policy: KVPolicyConfig) -> RequestLimits:
    try:
        limits = RequestLimits.of_request(extra_args, policy)
        if limits != RequestLimits.of_policy(policy) and current_platform.is_cuda():
            raise ConfigError(
                "vllm_xargs",
                extra_args,
                "requests can't have limits of their own on GPUs yet",
                "Leave them out",
            )
    except ConfigError as error:
        raise _refused(error) from error
    return limits


def _check_session(params: Any, policy: KVPolicyConfig) -> None:
    """A session's prompt grows, and the rule can't follow: blocks that are gone would have to come back."""
    own = params is not None and _limits(params.extra_args or {}, policy) != RequestLimits.of_policy(policy)
    if own or policy.prompt_budget_tokens is not None:
        raise _refused(
            ConfigError(
                "streaming input", "a session", "it can't have limits of its own, nor a budget for prompts",
                "Leave them out, and serve without --kv-prompt-budget",
            )
        )  # fmt: skip


def _check_pool(num_tokens: int, policy: KVPolicyConfig, vllm_config: VllmConfig) -> None:
    """A request that keeps everything has to fit alone: vLLM would compute a larger one again and again."""
    layer_types = getattr(vllm_config.model_config.hf_text_config, "layer_types", None) or ()
    if len(set(layer_types)) > 1:
        # How they share the cache's blocks is known to the engine only.
        raise _refused(
            ConfigError(
                POLICY, NO_POLICY, "this model mixes kinds of attention layers, so what fits isn't known",
                "Leave the policy on",
            )
        )  # fmt: skip
    parallel = vllm_config.parallel_config
    engines = (
        parallel.data_parallel_size_local if parallel.local_engines_only else parallel.data_parallel_size
    )
    # What the front end knows is the sum over its engines; one block of each is for padding.
    pool_tokens = (vllm_config.cache_config.num_gpu_blocks // engines - 1) * policy.block_size
    if num_tokens > pool_tokens:
        raise _refused(
            ConfigError(
                POLICY, NO_POLICY,
                f"prompt and answer may take {num_tokens} tokens, and the KV cache holds {pool_tokens}",
                "Give fewer max_tokens or a shorter prompt, or leave the policy on",
            )
        )  # fmt: skip


def _refused(error: ConfigError) -> VLLMValidationError:
    count_refused_request()
    return VLLMValidationError(str(error), parameter=error.setting)
