"""Registry of eviction policies; the name after ``--kv-policy`` is the key.

A policy says what a token's score is and what protects it, nothing else: which blocks go is decided by
``vllm_h2o.retention``, and how survivors move by ``vllm_h2o.compaction``. Implementations are imported on
first use, so that reading the configuration needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from vllm_h2o.errors import ConfigError

if TYPE_CHECKING:
    from vllm_h2o.config import KVPolicyConfig
    from vllm_h2o.policies.base import Policy

_POLICIES = {"h2o": "vllm_h2o.policies.h2o:H2OPolicy"}


def names() -> tuple[str, ...]:
    """Names of all known policies, sorted."""
    return tuple(sorted(_POLICIES))


def require_known(name: str) -> None:
    """Raise a ConfigError that lists the known policies unless ``name`` is one of them."""
    if name not in _POLICIES:
        raise ConfigError("--kv-policy", name, "there is no such policy", f"Known: {', '.join(names())}")


def create(config: "KVPolicyConfig") -> "Policy":
    """The policy object of a resolved configuration."""
    require_known(config.name)
    module, _, attribute = _POLICIES[config.name].partition(":")
    policy: Policy = getattr(import_module(module), attribute)(config)
    return policy
