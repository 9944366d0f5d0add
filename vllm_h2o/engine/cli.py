"""``--kv-policy`` and its companions on every vLLM command that takes engine arguments.

vLLM loads general plugins before it builds its parser, so wrapping ``EngineArgs.add_cli_args`` adds the
flags, and wrapping ``from_cli_args`` moves their values into ``additional_config``, which reaches every
process. ``--config file.yaml`` works because vLLM turns the file into flags.
"""

import argparse
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from vllm_h2o import policies
from vllm_h2o.config import CONFIG_KEY, GRANULARITIES
from vllm_h2o.errors import ConfigError
from vllm_h2o.settings import KVPolicySettings, flag_of

GROUP = "KVPolicy"
"""One word, as vLLM's own groups have: ``vllm serve --help=KVPolicy`` shows it alone."""

_HELP = {
    "name": f"Bound the KV cache of every request with this policy: {', '.join(policies.names())}.",
    "preset": "Take the policy's settings from a named set instead of its defaults: paper (h2o) is the "
    "algorithm exactly as published. Other flags still count.",
    "budget": "Most tokens whose KV a request keeps after a step: a count (512), or a fraction of "
    "--max-model-len (0.2, the default). Rounded up to whole blocks.",
    "prompt_budget": "The same while a prompt is being read in chunks; at its end it is cut to the budget "
    "(default: the budget). A count, or a fraction of --max-model-len.",
    "recent": "Newest tokens that are never dropped: a count, or a fraction of the budget (default of h2o "
    "0.1, of snapkv 32, of random 0.5, else 0).",
    "pin_tokens": "First tokens that are never dropped, and that requests share through the prefix cache; "
    "rounded up to whole blocks (default: one block).",
    "granularity": f"Drop single tokens or whole blocks: {', '.join(GRANULARITIES)} (default token).",
    "score_half_life": "Age in tokens at which a query's attention counts half in the scores (h2o; default "
    "32); none is the paper's plain sum.",
    "score_pool": "Odd number of neighbouring tokens whose highest score a token is ranked by (default of "
    "h2o 15, of snapkv 7, else 1: its own).",
    "score_window": "Newest queries whose attention counts (snapkv; default 32).",
    "score_rank": "What a token ranks by: the sum of the attention it received, its mean per query that saw "
    "the token, or value: the sum times the L1 norm of the token's value (h2o; default value).",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags under a heading of their own. Values are checked later, with the other source."""
    group = parser.add_argument_group(
        GROUP,
        "vllm-h2o: bounds the KV cache of every request by forgetting the tokens that attention used least.",
    )
    for field, text in _HELP.items():
        group.add_argument(flag_of(field), dest=_dest(field), default=argparse.SUPPRESS, help=text)


def settings_from_args(args: argparse.Namespace) -> KVPolicySettings:
    """What the flags say; fields without a flag, or whose flag wasn't given, are None."""
    return KVPolicySettings(**{field: getattr(args, _dest(field), None) for field in _HELP})


def with_flags(additional_config: Any, args: argparse.Namespace) -> Any:
    """``additional_config`` with the flags merged in; returned as it is when there is nothing to add.

    Raises:
        ConfigError: the two contradict each other, or settings are given without a policy.
    """
    written = KVPolicySettings.from_additional_config(additional_config)
    settings = KVPolicySettings.merge(settings_from_args(args), written)
    if settings == KVPolicySettings():
        return additional_config
    if not isinstance(additional_config, Mapping | None):
        raise ConfigError(
            "--additional-config", additional_config, "it must be a mapping", "Write it as {key: value}"
        )
    given = {f.name: getattr(settings, f.name) for f in fields(settings)}
    return {
        **(additional_config or {}),
        CONFIG_KEY: {name: value for name, value in given.items() if value is not None},
    }


def _dest(field: str) -> str:
    return "kv_policy" if field == "name" else f"kv_{field}"
