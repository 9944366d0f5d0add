"""Ray Serve with configs/ray/serve-h2o.yaml as docs/ray.md says, and vLLM's workers as Ray's actors."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

import server_process
from tests.e2e.servers import ENVIRONMENT, MODEL
from tests.engines import DEFAULTS
from tests.tiny_models import random_prompt, save
from vllm_h2o import retention

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),  # a dozen processes import vLLM; on busy cores that takes minutes
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray isn't installed: pip install 'vllm-h2o[ray]'"),
]

CONFIG = Path(__file__).parents[2] / "configs" / "ray" / "serve-h2o.yaml"
MODEL_NAME, BLOCK_SIZE, BUDGET = "smollm2", 32, 256
"""As the configuration says; 32 is the plugin's own block size on CPU."""

_START_SECONDS = 600.0
_STOP_SECONDS = 60.0
_MARK = "VLLM_H2O_TEST_CLUSTER"
"""Environment variable by which every process of a cluster is known."""

RAY_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_COLOR_PREFIX": "0",
    # Its other meaning: a cluster of one machine, on loopback. Ray replaces a given 127.0.0.1 otherwise.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}


def processes_of(mark: str) -> list[str]:
    """Command lines of the processes that have our mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200])
        except OSError:  # it has ended meanwhile, or isn't ours to look at
            continue
    return found


def wait_until_gone(mark: str) -> None:
    deadline = time.monotonic() + _STOP_SECONDS
    while left := processes_of(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.25)


# One worker in this process, then a scheduler here and two ranks in actors of Ray. vLLM's Ray executor
# refuses CPUs ("current platform cpu does not support ray"), because their platform names no resource that a
# worker takes; given one, it runs.
_ACTORS = """
import gc, json, sys

def take_slots():
    from vllm.platforms.cpu import CpuPlatform
    CpuPlatform.ray_device_key = "GPU"

def serve(options, prompts):
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory
    llm = LLM(**options)
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True, detokenize=False)
    # One after the other: how requests that arrive together are cut in chunks depends on timing.
    outputs = [llm.generate([{"prompt_token_ids": p}], params, use_tqdm=False)[0] for p in prompts]
    traces = llm.collective_rpc("take_kv_trace")
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    actors = [str(handle.actor) for handle in getattr(executor, "ray_worker_handles", [])]
    llm.llm_engine.engine_core.shutdown()
    del llm, executor
    gc.collect()
    cleanup_dist_env_and_memory()
    return {"tokens": [list(o.outputs[0].token_ids) for o in outputs], "traces": traces, "actors": actors}

def main():
    import ray
    options, prompts, result, folder = json.loads(sys.argv[1]), json.loads(sys.argv[2]), *sys.argv[3:]
    outcomes = [serve(options, prompts)]
    ray.init(
        num_cpus=2, num_gpus=2, include_dashboard=False, object_store_memory=100 * 2**20, _temp_dir=folder,
        runtime_env={"worker_process_setup_hook": take_slots},
    )
    take_slots()
    in_actors = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
    outcomes.append(serve({**options, **in_actors}, prompts))
    with open(result, "w") as file:
        json.dump(outcomes, file)
    ray.shutdown()

if __name__ == "__main__":
    main()
"""


def test_ranks_in_actors_equal_one_worker(tmp_path: Path) -> None:
    script, result, mark = tmp_path / "actors.py", tmp_path / "actors.json", uuid.uuid4().hex
    script.write_text(_ACTORS, encoding="utf-8")
    prompts = [random_prompt(length, seed=length) for length in (30, 150, 500)]
    options = {
        **DEFAULTS,
        "model": str(save("llama-gqa", tmp_path)),
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "additional_config": {"kv_policy": {"name": "h2o", "budget": 128, "trace": True}},
    }
    environment = {
        **os.environ,
        **RAY_ENVIRONMENT,
        _MARK: mark,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine has to be where Ray was started
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory(prefix="h2o-") as folder:
        process = subprocess.run(
            [sys.executable, str(script), json.dumps(options), json.dumps(prompts), str(result), folder],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_START_SECONDS,
            check=False,
        )
        assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
        wait_until_gone(mark)
    one, two = json.loads(result.read_text())
    assert one["actors"] == []
    assert [actor.partition(",")[0] for actor in two["actors"]] == ["Actor(RayWorkerProc"] * 2
    assert len(set(two["actors"])) == 2
    assert two["tokens"] == one["tokens"]
    ((single,),), ((first,), (second,)) = one["traces"], two["traces"]
    assert single["kept"], "nothing was evicted, so nothing was tested"
    # As in test_tensor_parallel: each rank holds one of the two KV heads.
    for whole, *halves in zip(single["kept"], first["kept"], second["kept"], strict=True):
        step, layer_name, positions, _ = whole
        assert [half[:2] for half in halves] == [[step, layer_name]] * 2
        assert [sorted(head) for half in halves for head in half[2]] == [sorted(h) for h in positions]


# `serve run CONFIG`, on a cluster that ends with it and has no dashboard.
_SERVE = """
import os, signal, sys, time
from pathlib import Path

def main():
    import ray
    from ray import serve
    from ray.serve.scripts import cli

    config, folder = sys.argv[1], Path(sys.argv[2])
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over what the configuration says
    ray.init(
        num_cpus=2, include_dashboard=False, namespace="serve", object_store_memory=100 * 2**20,
        _temp_dir=str(folder / "ray"),
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # ray.init has set its own
    try:
        cli(["run", "--non-blocking", config], standalone_mode=False)
        while (status := serve.status().applications["h2o"]).status != "RUNNING":
            if status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                sys.exit(f"{status.status}: {status.message}")
            time.sleep(0.5)
        (folder / "ready").touch()
        while True:
            time.sleep(1)
    finally:
        serve.shutdown()
        ray.shutdown()

if __name__ == "__main__":
    main()
"""


class Cluster:
    """A running Ray cluster with the configuration's application."""

    def __init__(self, folder: Path, url: str) -> None:
        self._logs = folder / "ray" / "session_latest" / "logs"
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0)

    def served(self) -> dict[str, str]:
        """Which replica of the model served each request: request id -> id of the replica."""
        pattern = re.compile(r"h2o_LLMServer:\S+ (\S+) (\S+) -- CALL \w+ OK")
        return {request: replica for replica, request in pattern.findall(self.logs())}

    def logs(self) -> str:
        """What all of Ray's workers, and the processes they started, have printed."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self._logs.glob("worker-*")))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Not pytest's folder: Ray keeps sockets below it, whose names may have 107 letters at most.
    folder = Path(tempfile.mkdtemp(prefix="h2o-"))
    mark, port = uuid.uuid4().hex, server_process.free_port()
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    config["http_options"]["port"] = port
    (model,) = config["applications"][0]["args"]["llm_configs"]
    model["model_loading_config"]["model_source"] = MODEL
    model["engine_kwargs"]["dtype"] = "float32"  # outputs are compared between batches
    (folder / "serve.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (folder / "serve.py").write_text(_SERVE, encoding="utf-8")
    server = server_process.Server(
        [sys.executable, str(folder / "serve.py"), str(folder / "serve.yaml"), str(folder)],
        port=port,
        log_path=folder / "serve.log",
        environment={**ENVIRONMENT, **RAY_ENVIRONMENT, _MARK: mark},
    )
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not (folder / "ready").exists():
            server.check_running("while starting")
            assert time.monotonic() < deadline, (folder / "serve.log").read_text()[-4000:]
            time.sleep(0.25)
        yield Cluster(folder, server.url)
    finally:
        server.stop()
        wait_until_gone(mark)
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def text() -> list[int]:
    from transformers import AutoTokenizer

    license_text = (Path(__file__).parents[2] / "LICENSE").read_text()
    ids: list[int] = AutoTokenizer.from_pretrained(MODEL)(license_text)["input_ids"]
    return ids


def ask(
    cluster: Cluster, prompt: list[int], max_tokens: int, request_id: str | None = None, **xargs: Any
) -> Any:
    return cluster.client.completions.create(
        model=MODEL_NAME, prompt=prompt, max_tokens=max_tokens, temperature=0,
        extra_headers={"x-request-id": request_id or uuid.uuid4().hex},
        extra_body={"ignore_eos": True, "vllm_xargs": {"kv_report": 1, **xargs}},
    )  # fmt: skip


def expected_report(computed: int, budget: int = BUDGET) -> dict[str, int]:
    blocks = retention.evicted_blocks(computed, budget_tokens=budget, block_size=BLOCK_SIZE)
    evicted = blocks * BLOCK_SIZE
    return {"evicted_tokens": evicted, "live_tokens": computed - evicted, "budget_tokens": budget}


def test_both_replicas_answer_alike(cluster: Cluster, text: list[int]) -> None:
    prompt, ids = text[:500], [uuid.uuid4().hex for _ in range(8)]
    with ThreadPoolExecutor(len(ids)) as pool:
        answers = list(pool.map(lambda request_id: ask(cluster, prompt, 60, request_id), ids))
    assert {answer.choices[0].text for answer in answers} == {answers[0].choices[0].text}
    for answer in answers:
        assert answer.usage.completion_tokens == 60
        assert answer.kv_transfer_params["kv_policy"] == expected_report(559)
    # Ray copies a process's output to its log a moment later.
    deadline = time.monotonic() + 10
    while not set(ids) <= (served := cluster.served()).keys():
        assert time.monotonic() < deadline, served
        time.sleep(0.25)
    assert len({served[request_id] for request_id in ids}) == 2, served


def test_a_chat_over_the_budget_loses_tokens(cluster: Cluster) -> None:
    license_text = (Path(__file__).parents[2] / "LICENSE").read_text()
    for content in ("Hi", license_text[:3000]):
        chat = cluster.client.chat.completions.create(
            model=MODEL_NAME, messages=[{"role": "user", "content": content}], max_tokens=40, temperature=0,
            extra_body={"ignore_eos": True, "vllm_xargs": {"kv_report": 1}},
        )  # fmt: skip
        report = chat.model_extra["kv_transfer_params"]["kv_policy"]
        assert report == expected_report(chat.usage.total_tokens - 1)
        assert (report["evicted_tokens"] > 0) == (content != "Hi")


def test_a_request_may_ask_for_less(cluster: Cluster, text: list[int]) -> None:
    answer = ask(cluster, text[:300], 20, kv_budget=128)
    assert answer.kv_transfer_params["kv_policy"] == expected_report(319, 128)


@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_value_is_a_400_that_says_the_range(cluster: Cluster, text: list[int], stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        cluster.client.completions.create(
            model=MODEL_NAME, prompt=text[:20], max_tokens=4, stream=stream,
            extra_body={"vllm_xargs": {"kv_budget": BUDGET + 1}},
        )  # fmt: skip
    assert error.value.status_code == 400
    assert f"over the server's budget of {BUDGET} tokens" in str(error.value)


def test_each_engine_says_what_is_in_force(cluster: Cluster) -> None:
    line = f"KV policy h2o: budget {BUDGET} tokens (2048 while a prompt is read) of max_model_len 8192"
    assert cluster.logs().count(line) == 2
