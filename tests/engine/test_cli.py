"""How settings reach the engine's configuration, and that without a policy nothing is changed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from tests.command_line import engine_config, parse
from tests.engines import MODEL
from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.engine import backend
from vllm_h2o.engine.cli import GROUP
from vllm_h2o.engine.compat import CPU_WORKER
from vllm_h2o.engine.install import WORKER
from vllm_h2o.plugin import register

FLAGS = [
    "--kv-policy",
    "--kv-preset",
    "--kv-budget",
    "--kv-prompt-budget",
    "--kv-recent",
    "--kv-pin-tokens",
    "--kv-granularity",
    "--kv-score-half-life",
    "--kv-score-pool",
    "--kv-score-rank",
    "--kv-score-window",
]
SETTINGS: dict[str, Any] = {
    "name": "h2o",
    "preset": "paper",
    "budget": 512,
    "prompt_budget": 0.5,
    "recent": 0.25,
    "pin_tokens": 64,
    "granularity": "block",
    "score_half_life": 32.5,
    "score_pool": 3,
    "score_rank": "mean",
}
CONFIGS = Path(__file__).parents[2] / "configs"
LIMITS = ["--max-model-len", "2048", "--max-num-batched-tokens", "256"]


@pytest.fixture(autouse=True)
def _stock_backend() -> Iterator[None]:
    """Leave no policy active in this process, which other tests run engines in."""
    yield
    backend.deactivate()


def flags(settings: dict[str, Any]) -> list[str]:
    # The last flag is one that h2o refuses.
    names = dict(zip(SETTINGS, FLAGS[:-1], strict=True))
    return [word for name, value in settings.items() for word in (names[name], str(value))]


def policy_of(config: Any) -> KVPolicyConfig:
    policy = KVPolicyConfig.from_additional_config(config.additional_config)
    assert policy is not None
    return policy


# --- help ----------------------------------------------------------------------------------------


def run_vllm(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What the ``vllm`` command prints before it exits."""
    from vllm.entrypoints.cli.main import main

    # The command sets this for the rest of the process, and remembers what was searched for.
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setattr(FlexibleArgumentParser, "_search_keyword", None)
    monkeypatch.setattr(sys, "argv", ["vllm", *words])
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 0
    return capsys.readouterr().out


def test_help_lists_the_group(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown = run_vllm(["serve", "--help"], monkeypatch, capsys)
    (line,) = [line for line in shown.splitlines() if GROUP in line]
    assert len(line.split(GROUP)[1].strip()) > 10, "the group says what it is about"


@pytest.mark.parametrize("search", [GROUP, GROUP.lower(), "all"])
def test_help_has_the_flags_under_their_heading(
    search: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = run_vllm(["serve", f"--help={search}"], monkeypatch, capsys)
    _, described = re.split(rf"^{re.escape(GROUP)}:$", shown, flags=re.MULTILINE)
    # Up to the next line that starts at the margin: a heading, or the end of the text.
    section = re.split(r"^\S", described, flags=re.MULTILINE)[0]
    assert all(f"  {flag} " in section for flag in FLAGS)


@pytest.mark.parametrize(
    "command",
    [
        ["serve"],
        ["run-batch"],
        ["bench", "throughput"],
        ["bench", "latency"],
        ["bench", "startup"],
    ],
    ids=" ".join,
)
def test_every_command_that_starts_an_engine_has_the_flags(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = run_vllm([*command, "--help=kv-"], monkeypatch, capsys)
    assert all(f"  {flag} " in shown for flag in FLAGS)


# --- the ways in ---------------------------------------------------------------------------------


def by_flags(tmp_path: Path) -> Any:
    return engine_config(*LIMITS, *flags(SETTINGS))


def by_flags_with_underscores(tmp_path: Path) -> Any:
    words = (f"{word[:2]}{word[2:].replace('-', '_')}" for word in flags(SETTINGS))
    return engine_config(*LIMITS, *words)


def by_file_of_flags(tmp_path: Path) -> Any:
    path = tmp_path / "serve.yaml"
    names = (flag.removeprefix("--") for flag in FLAGS[:-1])
    path.write_text(yaml.safe_dump(dict(zip(names, SETTINGS.values(), strict=True))))
    return engine_config("--config", str(path), *LIMITS)


def by_file_of_additional_config(tmp_path: Path) -> Any:
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump({"additional-config": {"kv_policy": SETTINGS}}))
    return engine_config("--config", str(path), *LIMITS)


def by_dotted_additional_config(tmp_path: Path) -> Any:
    given = (
        word
        for name, value in SETTINGS.items()
        for word in (f"--additional-config.kv_policy.{name}", str(value))
    )
    return engine_config(*LIMITS, *given)


def by_json_additional_config(tmp_path: Path) -> Any:
    return engine_config(*LIMITS, "--additional-config", json.dumps({"kv_policy": SETTINGS}))


def by_flags_and_additional_config(tmp_path: Path) -> Any:
    some = {name: SETTINGS[name] for name in ("name", "budget", "recent")}
    others = {name: SETTINGS[name] for name in SETTINGS if name not in some} | {"budget": SETTINGS["budget"]}
    return engine_config(
        *LIMITS, *flags(some), "--additional-config", json.dumps({"kv_policy": others})
    )  # fmt: skip


def by_async_engine_args(tmp_path: Path) -> Any:
    return AsyncEngineArgs(
        model=MODEL,
        max_model_len=2048,
        max_num_batched_tokens=256,
        additional_config={"kv_policy": SETTINGS},
    ).create_engine_config()


def by_engine_args(tmp_path: Path) -> Any:
    return EngineArgs(
        model=MODEL,
        max_model_len=2048,
        max_num_batched_tokens=256,
        additional_config={"kv_policy": SETTINGS},
    ).create_engine_config()


@pytest.mark.parametrize(
    "way",
    [
        by_flags,
        by_flags_with_underscores,
        by_file_of_flags,
        by_file_of_additional_config,
        by_dotted_additional_config,
        by_json_additional_config,
        by_flags_and_additional_config,
        by_async_engine_args,
        by_engine_args,
    ],
)
def test_every_way_in_gives_the_same_policy(way: Any, tmp_path: Path) -> None:
    config = way(tmp_path)
    assert policy_of(config) == KVPolicyConfig(
        name="h2o",
        block_size=32,
        budget_tokens=512,
        recent_tokens=128,
        pinned_blocks=2,
        granularity="block",
        score_half_life_tokens=32.5,
        score_pool=3,
        rank_by="mean",
        max_model_len=2048,
        max_in_flight_tokens=256,
        prompt_budget_tokens=1024,
    )
    assert config.parallel_config.worker_cls == WORKER


def test_other_processes_find_the_policy_in_the_arguments() -> None:
    """Several API servers: each reads the parsed arguments again, and loads plugins only while it does."""
    args = parse(*LIMITS, "--kv-policy", "h2o", "--kv-budget", "512")
    AsyncEngineArgs.from_cli_args(args)
    assert args.additional_config["kv_policy"] == {"name": "h2o", "budget": "512"}
    again = AsyncEngineArgs.from_cli_args(args).create_engine_config()
    assert policy_of(again).budget_tokens == 512


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("serve-*.yaml")), ids=lambda path: path.stem)
def test_the_configurations_for_serving_work(path: Path) -> None:
    policy = policy_of(engine_config("--config", str(path), "--max-model-len", "8192"))
    written = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert policy.budget_tokens == written["kv-budget"]
    assert policy.evicts


def test_a_flag_overrides_the_file(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump({"kv-policy": "h2o", "kv-budget": 512}))
    assert policy_of(engine_config("--config", str(path), "--kv-budget", "256")).budget_tokens == 256


def test_a_name_alone_is_a_policy() -> None:
    by_name = policy_of(engine_config(*LIMITS, "--additional-config.kv_policy", "h2o"))
    assert by_name == policy_of(engine_config(*LIMITS, "--kv-policy", "h2o"))
    assert by_name.budget_tokens == 416  # a fifth of 2,048, in whole blocks


def test_other_additional_config_is_kept() -> None:
    given = {"kv_policy": {"budget": 512}, "other": {"a": 1}}
    config = engine_config("--kv-policy", "h2o", "--additional-config", json.dumps(given))
    assert config.additional_config["other"] == {"a": 1}
    assert set(config.additional_config) == {"other", "kv_policy"}


def test_engine_args_can_be_used_again() -> None:
    args = AsyncEngineArgs(
        model=MODEL, max_model_len=2048, additional_config={"kv_policy": {"name": "h2o", "budget": 512}}
    )
    first, second = (policy_of(args.create_engine_config()) for _ in range(2))
    assert first == second
    assert args.additional_config == {"kv_policy": {"name": "h2o", "budget": 512}}


def test_policies_have_hashes_of_their_own() -> None:
    words = [[], ["--kv-policy", "h2o"], ["--kv-policy", "h2o", "--kv-budget", "512"]]
    hashes = [engine_config(*LIMITS, "--block-size", "32", *flags_).compute_hash() for flags_ in words]
    assert len(set(hashes)) == 3


# --- without a policy ----------------------------------------------------------------------------

WITHOUT_POLICY = """
import dataclasses, json, sys
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser

load_general_plugins()
plugin_loaded = "vllm_h2o.engine.install" in sys.modules
parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
words = ["--model", sys.argv[1], "--max-model-len", "2048"]
by_flags = AsyncEngineArgs.from_cli_args(parser.parse_args(words))
args = {"by flags": by_flags, "by hand": EngineArgs(model=sys.argv[1], max_model_len=2048)}
state = {}
for name, given in args.items():
    state[name] = {f.name: repr(getattr(given, f.name)) for f in dataclasses.fields(given)}
    config = given.create_engine_config()
    state[name, "afterwards"] = {f.name: repr(getattr(given, f.name)) for f in dataclasses.fields(given)}
    state[name, "config"] = {
        "worker_cls": config.parallel_config.worker_cls,
        "worker_extension_cls": config.parallel_config.worker_extension_cls,
        "additional_config": repr(config.additional_config),
        "block_size": config.cache_config.block_size,
        "scheduler_cls": repr(config.scheduler_config.scheduler_cls),
        "hash": config.compute_hash(),
    }

# Imported last, so that what they find was there before.
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_spec_registry import _REGISTRY_KVCACHESPEC_LIST

state["backends"] = {member.name: member.get_path() for member in AttentionBackendEnum if member.value}
state["overridden"] = [member.name for member in AttentionBackendEnum if member.is_overridden()]
state["specs"] = [repr(entry) for entry in _REGISTRY_KVCACHESPEC_LIST.values()]
print(json.dumps([plugin_loaded, {str(key): value for key, value in state.items()}]))
"""


@pytest.fixture(scope="module")
def without_policy() -> dict[bool, dict[str, Any]]:
    """What vLLM sets up without a policy, keyed by whether the plugin is loaded; fresh processes."""

    def run(environment: dict[str, str]) -> list[Any]:
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_POLICY, MODEL],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        result: list[Any] = json.loads(done.stdout.splitlines()[-1])
        return result

    with ThreadPoolExecutor(2) as pool:
        # An empty list of plugins lets none in.
        states = dict(pool.map(run, ({}, {"VLLM_PLUGINS": ""})))
    assert set(states) == {True, False}
    return states


@pytest.mark.e2e
@pytest.mark.parametrize("part", ["args", "config", "attention backends", "KV cache specs"])
def test_without_a_policy_everything_is_vllms_own(
    part: str, without_policy: dict[bool, dict[str, Any]]
) -> None:
    keys = {
        "args": ["by flags", "by hand", "('by flags', 'afterwards')", "('by hand', 'afterwards')"],
        "config": ["('by flags', 'config')", "('by hand', 'config')"],
        "attention backends": ["backends", "overridden"],
        "KV cache specs": ["specs"],
    }[part]
    for key in keys:
        assert without_policy[True][key] == without_policy[False][key]


def test_an_engine_without_a_policy_after_one_with_gets_vllms_classes() -> None:
    stock = engine_config(*LIMITS)
    path = AttentionBackendEnum.CPU_ATTN.get_path()
    assert "vllm_h2o" not in path

    engine_config(*LIMITS, *flags(SETTINGS))
    assert AttentionBackendEnum.CPU_ATTN.get_class() is backend.H2OCPUAttentionBackend

    again = engine_config(*LIMITS)
    assert AttentionBackendEnum.CPU_ATTN.get_path() == path
    assert not AttentionBackendEnum.CPU_ATTN.is_overridden()
    assert again.parallel_config.worker_cls == stock.parallel_config.worker_cls == CPU_WORKER
    assert again.additional_config == stock.additional_config
    assert again.compute_hash() == stock.compute_hash()


def test_block_size_is_ours_only_with_a_policy_and_only_as_a_default() -> None:
    stock = engine_config(*LIMITS).cache_config.block_size
    assert stock != 32
    assert engine_config(*LIMITS, "--kv-policy", "h2o").cache_config.block_size == 32
    given = engine_config(*LIMITS, "--kv-policy", "h2o", "--block-size", "64")
    assert given.cache_config.block_size == 64
    assert policy_of(given).block_size == 64
    assert engine_config(*LIMITS).cache_config.block_size == stock


def test_registering_again_changes_nothing() -> None:
    names = ("add_cli_args", "from_cli_args", "create_engine_config")
    before = [EngineArgs.__dict__[name] for name in names]
    register()
    register()
    assert [EngineArgs.__dict__[name] for name in names] == before
    assert vars(parse("--kv-policy", "h2o"))["kv_policy"] == "h2o"
