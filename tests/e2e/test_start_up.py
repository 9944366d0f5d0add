"""What a user gets for a bad setting: one message that says all, before anything is loaded."""

from __future__ import annotations

import json
import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.command_line import engine_config
from tests.e2e.servers import ENVIRONMENT, MODEL, VLLM
from vllm_h2o import policies
from vllm_h2o.errors import ConfigError, H2OError, RefusedError

pytestmark = pytest.mark.e2e

NGRAM = json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4})
UNSERVABLE = ["--speculative-config", NGRAM, "--kv-cache-dtype", "fp8"]

KNOWN = ", ".join(policies.names())
UNKNOWN_POLICY = f"--kv-policy='h3o': there is no such policy. Known: {KNOWN}"
NO_POLICY = "--kv-budget='512': it has no effect without --kv-policy. Add --kv-policy h2o, or drop it"
REFUSED = """--kv-policy h2o can't be used here:
  - speculative decoding (found: ngram). Drop --speculative-config.
  - quantised KV caches (found: fp8). Use --kv-cache-dtype auto."""


def test_the_command_says_so_and_fails() -> None:
    commands = {
        UNKNOWN_POLICY: ["--kv-policy", "h3o"],
        NO_POLICY: ["--kv-budget", "512"],
        REFUSED: ["--kv-policy", "h2o", "--kv-budget", "512", *UNSERVABLE],
    }

    def run(words: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*VLLM, "serve", MODEL, "--max-model-len", "2048", *words],
            env={**os.environ, **ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=200,
        )

    # All at once: nearly all of their time goes into importing vLLM.
    with ThreadPoolExecutor(len(commands)) as pool:
        for message, done in zip(commands, pool.map(run, commands.values()), strict=True):
            assert done.returncode != 0
            # The last thing on the screen, and in the words of a typed error.
            assert re.search(rf"Error: {re.escape(message)}\s*\Z", done.stdout), done.stdout[-2000:]
            assert "Starting to load model" not in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--kv-policy", "h3o"], UNKNOWN_POLICY),
        (["--kv-policy", "H2O"], f"--kv-policy='H2O': there is no such policy. Known: {KNOWN}"),
        (["--kv-policy", ""], f"--kv-policy='': there is no such policy. Known: {KNOWN}"),
        (
            ["--kv-policy", "h2o", "--kv-budget", "0"],
            "--kv-budget='0': it must be a whole number of at least 1. Give 1 or more",
        ),
        (
            ["--kv-policy", "h2o", "--kv-budget", "-1"],
            "--kv-budget='-1': it must be a whole number of at least 1. Give 1 or more",
        ),
        (
            ["--kv-policy", "h2o", "--kv-budget", "abc"],
            "--kv-budget='abc': it is not a finite number. Give a plain number",
        ),
        (
            ["--kv-policy", "h2o", "--kv-budget", "1.5"],
            "--kv-budget='1.5': a fraction must lie in (0, 1]. "
            "Give a fraction, or a whole number of tokens",
        ),
        (
            ["--kv-policy", "h2o", "--kv-budget", "40"],
            "--kv-budget='40': 64 tokens can't hold 32 pinned + 6 recent + one block of 32. "
            "Give at least 96",
        ),
        (["--kv-budget", "512"], NO_POLICY),
        (
            ["--additional-config.kv_policy.budget", "512"],
            "--kv-budget=512: it has no effect without --kv-policy. Add --kv-policy h2o, or drop it",
        ),
        (
            ["--kv-policy", "h2o", "--kv-budget", "512", "--additional-config.kv_policy.budget", "256"],
            "--kv-budget='512': additional_config.kv_policy.budget says 256. Give it in one place only",
        ),
        (
            ["--kv-policy", "h2o", "--additional-config.kv_policy.name", "tova"],
            "--kv-policy='h2o': additional_config.kv_policy.name says 'tova'. Give it in one place only",
        ),
        (
            ["--kv-policy", "h2o", "--additional-config.kv_policy.budgets", "256"],
            "additional_config.kv_policy.budgets=256: there is no such setting. Known: name, preset, ",
        ),
    ],
)  # fmt: skip
def test_a_bad_setting_is_named_with_its_limit_and_the_fix(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        engine_config("--max-model-len", "2048", *words)
    assert str(error.value).startswith(message)


def test_the_budget_that_a_refusal_names_is_accepted() -> None:
    words = ["--max-model-len", "2048", "--kv-policy", "h2o", "--kv-budget"]
    with pytest.raises(ConfigError, match=r"Give at least 96$"):
        engine_config(*words, "64")
    config = engine_config(*words, "96")
    assert config.additional_config["kv_policy"]["budget_tokens"] == 96


def test_all_that_cannot_be_served_is_listed_at_once() -> None:
    with pytest.raises(RefusedError) as error:
        engine_config("--max-model-len", "2048", "--kv-policy", "h2o", "--kv-budget", "512", *UNSERVABLE)
    assert str(error.value) == REFUSED
    assert len(error.value.refusals) == 2
    assert isinstance(error.value, H2OError)


def test_what_cannot_be_served_with_a_policy_is_vllms_without_one() -> None:
    config = engine_config("--max-model-len", "2048", *UNSERVABLE)
    assert config.speculative_config.method == "ngram"
    assert config.cache_config.cache_dtype == "fp8"
