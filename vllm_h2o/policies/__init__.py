"""Registry of eviction policies; the name after ``--kv-policy`` is the key.

A policy says what a token's rank is, nothing else: which blocks go is decided by ``vllm_h2o.retention``, and
how survivors move by ``vllm_h2o.kernels``. Other distributions add theirs by an entry point of the group
``vllm_h2o.policies`` (docs/writing-a-policy.md). Implementations are imported on first use, in every process
that needs them.
"""

from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from vllm_h2o.errors import ConfigError

if TYPE_CHECKING:
    from vllm_h2o.config import KVPolicyConfig
    from vllm_h2o.policies.base import Policy

ENTRY_POINT_GROUP = "vllm_h2o.policies"

_BUILT_IN = {
    "h2o": "h2o:H2OPolicy",
    "keydiff": "keydiff:KeyDiffPolicy",
    "random": "random:RandomPolicy",
    "snapkv": "snapkv:SnapKVPolicy",
    "streaming": "streaming:StreamingPolicy",
    "tova": "tova:TOVAPolicy",
}


def names() -> tuple[str, ...]:
    """Names of all known policies, sorted."""
    return tuple(sorted({*_BUILT_IN, *(point.name for point in _entry_points())}))


def load(name: str) -> "type[Policy]":
    """The class of a policy.

    Raises:
        ConfigError: there is none of that name, there are two, or it can't be imported.
    """
    theirs = [point for point in _entry_points() if point.name == name]
    if len(theirs) + (name in _BUILT_IN) > 1:
        owners = [*(["vllm-h2o"] if name in _BUILT_IN else []), *map(_owner, theirs)]
        raise ConfigError(
            "--kv-policy", name, f"several distributions have a policy of that name: {', '.join(owners)}",
            "Uninstall all but one of them, or rename one",
        )  # fmt: skip
    if theirs:
        return _load_theirs(theirs[0])
    if name not in _BUILT_IN:
        raise ConfigError("--kv-policy", name, "there is no such policy", f"Known: {', '.join(names())}")
    module, _, attribute = _BUILT_IN[name].partition(":")
    policy: type[Policy] = getattr(import_module(f"{__name__}.{module}"), attribute)
    return policy


def create(config: "KVPolicyConfig") -> "Policy":
    """The policy object of a resolved configuration."""
    return load(config.name)(config)


@cache
def _entry_points() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=ENTRY_POINT_GROUP))


def _load_theirs(point: EntryPoint) -> "type[Policy]":
    from vllm_h2o.config import ATTENTION_RANKS, RANKS
    from vllm_h2o.policies.base import AttentionPolicy, Policy

    try:
        policy = point.load()
    except Exception as error:  # whatever their module raises is the reason
        raise ConfigError(
            "--kv-policy", point.name, f"{point.value} of {_owner(point)} can't be imported ({error!r})",
            "Repair or uninstall it",
        ) from error  # fmt: skip
    if not (isinstance(policy, type) and issubclass(policy, Policy)):
        raise ConfigError(
            "--kv-policy", point.name, f"{point.value} of {_owner(point)} is no policy",
            "Make it a subclass of vllm_h2o.policies.base.Policy",
        )  # fmt: skip
    ranks = getattr(policy, "ranks", ())
    by_attention = set(ranks) <= set(ATTENTION_RANKS)
    if not ranks or not set(ranks) <= set(RANKS) or by_attention != issubclass(policy, AttentionPolicy):
        raise ConfigError(
            "--kv-policy", point.name, f"{point.value} of {_owner(point)} ranks tokens by {ranks!r}",
            f"Set `ranks` to some of {', '.join(ATTENTION_RANKS)} for an AttentionPolicy, else to some of "
            f"{', '.join(RANKS[len(ATTENTION_RANKS) :])}",
        )  # fmt: skip
    return policy


def _owner(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value
