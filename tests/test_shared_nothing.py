"""Nothing of ours needs two of vLLM's processes to be one: Ray may put each of them on another machine.

A front end resolves the policy, a scheduler frees blocks, workers compact; what passes between them is what
vLLM itself sends: the configuration, the specs of the layers, and one message per step.
"""

from __future__ import annotations

import ast
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from tests.test_boundaries import MODULES, imports, parse
from vllm_h2o.config import CONFIG_KEY, KVPolicyConfig
from vllm_h2o.request_limits import RequestLimits
from vllm_h2o.settings import KVPolicySettings

MODEL = os.environ.get("VLLM_H2O_MODEL", str(Path(__file__).parents[1] / "models" / "SmolLM2-135M-Instruct"))

WORKER_ROOTS = ("engine/worker.py", "engine/gpu/worker.py")
SCHEDULER_ROOTS = ("engine/scheduler.py", "engine/spec.py")

FRONT_END_STATE = {
    "engine/metrics.py": {"StatLoggerManager.__init__", "_refused_requests"},
    "engine/request_checks.py": {"InputProcessor.process_inputs", "SamplingParams.from_optional", "_policy"},
    "engine/install.py": {
        "EngineArgs.add_cli_args",
        "EngineArgs.create_engine_config",
        "EngineArgs.from_cli_args",
    },
    "plugin.py": {"EngineArgs.create_engine_config"},
}
"""Everything of ours, or of vLLM's that we replace, that lasts as long as a process and changes in it."""

MEMOS = {
    "kernels/__init__.py": {"_say_slow"},
    "kernels/native/library.py": {"load"},
    "policies/__init__.py": {"_entry_points"},
}
"""Functions that a process runs once. Their results follow from what is installed where they run."""

_MUTATORS = (
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert"),
    *("pop", "popitem", "popleft", "remove", "setdefault", "update"),
)


def root(node: ast.expr) -> str | None:
    """``a`` of ``a.b[0].c``."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def bound_names(statement: ast.AST) -> Iterator[str]:
    """Names that a statement binds itself, functions inside it left out."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
        return
    if isinstance(statement, ast.Import | ast.ImportFrom):
        yield from ((alias.asname or alias.name).partition(".")[0] for alias in statement.names)
    if isinstance(statement, ast.Name) and isinstance(statement.ctx, ast.Store):
        yield statement.id
    if not isinstance(statement, ast.Lambda):
        for child in ast.iter_child_nodes(statement):
            yield from bound_names(child)


def changed_expressions(node: ast.AST) -> Iterator[ast.expr]:
    """What a node changes in place: ``x`` of ``x[0] = 1`` and ``x.append(1)``, ``x.y`` of ``x.y = 1``."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
        yield node
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
        yield node.value
    elif isinstance(node, ast.Call):
        if isinstance(node.func, ast.Attribute) and node.func.attr in _MUTATORS:
            yield node.func.value
        elif isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr") and node.args:
            target, name = node.args[:2]
            attribute = name.value if isinstance(name, ast.Constant) else "?"
            yield ast.Attribute(target, str(attribute), ast.Store())


def lasting_state(tree: ast.Module) -> set[str]:
    """Names of a module, and attributes of them or of what it imports, that its functions change."""
    of_module = {name for statement in tree.body for name in bound_names(statement)}
    libraries = {
        name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in bound_names(node)
    }
    found: set[str] = set()
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        shared = {n for node in ast.walk(function) if isinstance(node, ast.Global) for n in node.names}
        found |= shared
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        own = {argument.arg for argument in arguments}
        own |= {name for statement in function.body for name in bound_names(statement)} - shared
        imported = {
            name
            for node in ast.walk(function)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in bound_names(node)
        }
        visible = (of_module - own) | imported | {"cls"}
        for node in ast.walk(function):
            for changed in changed_expressions(node):
                is_library = isinstance(changed, ast.Name) and changed.id in libraries  # np.append(a, b)
                if root(changed) in visible and not is_library:
                    found.add(ast.unparse(changed))
    return found


def memos(tree: ast.Module) -> set[str]:
    """Functions that remember their results for the whole process."""
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for decorator in node.decorator_list
        if ast.unparse(decorator).partition("(")[0].rpartition(".")[2] in ("cache", "lru_cache")
    }


def reachable(roots: tuple[str, ...]) -> set[str]:
    """Our modules that these import, at any time and through others."""
    paths = {
        ("vllm_h2o/" + m).removesuffix(".py").removesuffix("/__init__").replace("/", "."): m for m in MODULES
    }
    found: set[str] = set()
    pending = list(roots)
    while pending:
        module = pending.pop()
        if module in found:
            continue
        found.add(module)
        for name in imports(parse(module), module):
            parts = name.split(".")
            packages = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
            pending += [paths[package] for package in packages if package in paths]
    return found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("x = 0\ndef f():\n    global x\n    x = 1", {"x"}),
        ("x = {}\ndef f(k):\n    x[k] = 1", {"x"}),
        ("x = []\ndef f(k):\n    x.append(k)", {"x"}),
        ("x = {}\nclass C:\n    def f(self):\n        del x[0]", {"x"}),
        ("import m\ndef f():\n    m.C.g = 1", {"m.C.g"}),
        ("def f():\n    from m import C\n    C.g = 1", {"C.g"}),
        ("from m import C\ndef f():\n    setattr(C, 'g', 1)", {"C.g"}),
        (
            "class C:\n    seen = []\n    @classmethod\n    def f(cls):\n        cls.seen.append(1)",
            {"cls.seen"},
        ),
        ("x = {}\ndef f():\n    x = {}\n    x[0] = 1", set()),
        ("x = {}\ndef f(x):\n    x[0] = 1", set()),
        ("import numpy as np\ndef f(x):\n    return np.append(x, 1)", set()),
        ("class C:\n    def f(self):\n        self.x = 1\n        self.x.append(2)", set()),
    ],
)
def test_state_is_found(source: str, found: set[str]) -> None:
    assert lasting_state(ast.parse(source)) == found


def test_memos_are_found() -> None:
    source = "@cache\ndef a(): ...\n@functools.lru_cache(1)\ndef b(): ...\n@cached_property\ndef c(self): ..."
    assert memos(ast.parse(source)) == {"a", "b"}


def test_all_lasting_state_is_the_front_ends() -> None:
    """A new entry needs an answer to: who writes it, who reads it, and are they always one process?"""
    assert {module: state for module in MODULES if (state := lasting_state(parse(module)))} == FRONT_END_STATE
    assert {module: names for module in MODULES if (names := memos(parse(module)))} == MEMOS


@pytest.mark.parametrize("roots", [WORKER_ROOTS, SCHEDULER_ROOTS], ids=["workers", "schedulers"])
def test_schedulers_and_workers_cannot_read_it(roots: tuple[str, ...]) -> None:
    modules = reachable(roots)
    assert {"retention.py", "request_limits.py", "config.py"} <= modules
    assert sorted(modules & FRONT_END_STATE.keys()) == []


SETTINGS = [
    KVPolicySettings(name="h2o", budget=256),
    KVPolicySettings(name="h2o", preset="paper", budget=0.25, pin_tokens=64),
    KVPolicySettings(name="snapkv", budget=512, prompt_budget=1024),
    KVPolicySettings(name="streaming", granularity="block"),
]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: f"{settings.name}-{settings.budget}")
def test_the_resolved_policy_is_plain_data(settings: KVPolicySettings) -> None:
    """So it survives every way in which a configuration may be sent."""
    policy, _ = settings.resolve(max_model_len=2048, block_size=32, max_in_flight_tokens=256)
    sent = json.loads(json.dumps({CONFIG_KEY: policy.to_dict()}))
    assert KVPolicyConfig.from_additional_config(sent) == policy


_ELSEWHERE = """
import pickle, sys
policy, asked, lengths = pickle.load(sys.stdin.buffer)
from vllm_h2o.request_limits import RequestLimits
limits = [RequestLimits.of_request(each, policy) for each in asked]
print([[each.evicted_blocks(length, policy.block_size) for length in lengths] for each in limits])
print(sorted({"torch", "vllm"} & set(sys.modules)))
"""

ASKED = [None, {}, {"kv_budget": 160}, {"kv_pin_tokens": 96}, {"kv_policy": "none"}, {"kv_report": 1}]


def test_the_rule_is_the_same_elsewhere() -> None:
    """In a process that gets the policy and the request's own words, and has neither torch nor vLLM."""
    policy, _ = SETTINGS[0].resolve(max_model_len=2048, block_size=32, max_in_flight_tokens=256)
    lengths = [1, 159, 160, 255, 256, 257, 1000, 2047]
    done = subprocess.run(
        [sys.executable, "-c", _ELSEWHERE],
        input=cloudpickle.dumps((policy, ASKED, lengths)),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    numbers, loaded = done.stdout.decode().splitlines()
    limits = [RequestLimits.of_request(each, policy) for each in ASKED]
    here = [[each.evicted_blocks(length, policy.block_size) for length in lengths] for each in limits]
    assert json.loads(numbers) == here
    assert len({tuple(row) for row in here}) > 2, "the requests differ"
    assert loaded == "[]"


# What vLLM's three kinds of processes do with the policy, each in a fresh one, without a model's weights.
_FRONT_END = """
import sys
from pathlib import Path
import cloudpickle
from vllm.engine.arg_utils import EngineArgs

folder, model = Path(sys.argv[1]), sys.argv[2]
vllm_config = EngineArgs(
    model=model, dtype="float32", enforce_eager=True, block_size=32, max_model_len=2048,
    max_num_batched_tokens=256, max_num_seqs=16, num_gpu_blocks_override=200, enable_prefix_caching=False,
    kv_cache_memory_bytes=2**28,
    additional_config={"kv_policy": {"name": "h2o", "budget": 256, "prompt_budget": 512}},
).create_engine_config()
(folder / "config").write_bytes(cloudpickle.dumps(vllm_config))
"""

_WORKER = """
import json, pickle, sys
from pathlib import Path

folder = Path(sys.argv[1])
vllm_config = pickle.loads((folder / "config").read_bytes())

from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.utils.import_utils import resolve_obj_by_qualname
worker_class = resolve_obj_by_qualname(vllm_config.parallel_config.worker_cls)

import numpy as np
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm_h2o.engine import backend
from vllm_h2o.engine.spec import evicting
from vllm_h2o.planner import StepPlanner
from vllm_h2o.query_ring import QueryRing

assert not backend.is_active(), "another process has chosen the backend, not this one"
worker = worker_class(
    vllm_config=vllm_config, local_rank=0, rank=0, distributed_init_method="", is_driver_worker=True
)
assert backend.is_active()
policy = worker.kv_policy
full = FullAttentionSpec(block_size=policy.block_size, num_kv_heads=3, head_size=64, dtype=torch.float32)
(folder / "spec.part").write_bytes(pickle.dumps(evicting(full, policy)))
(folder / "spec.part").rename(folder / "spec")

sys.stdin.readline()  # the scheduler has sent its messages
planner = StepPlanner(policy, QueryRing(16, policy.block_size), None)
gaps, limits = [], {}
for message in pickle.loads((folder / "messages").read_bytes()):
    output = pickle.loads(message)
    worker.requests.forget(output.finished_req_ids)
    computed = {}
    for new in output.scheduled_new_reqs:
        worker.requests.add(new.req_id, new.sampling_params.extra_args, len(new.prompt_token_ids))
        limits[new.req_id] = worker.requests.of(new.req_id)
        computed[new.req_id] = new.num_computed_tokens
    cached = output.scheduled_cached_reqs
    computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    ids = sorted(output.num_scheduled_tokens)
    new = np.array([output.num_scheduled_tokens[name] for name in ids])
    total = np.array([computed[name] for name in ids]) + new
    table = np.ones((len(ids), 80), dtype=np.int32)
    batch = planner.batch(total, np.concatenate([[0], np.cumsum(new)]), table, worker.requests.rows(ids))
    gaps.append(dict(zip(ids, batch.gap_blocks.tolist(), strict=True)))
print(json.dumps({"policy": policy.to_dict(), "limits": limits, "gaps": gaps}))
"""

_SCHEDULER = """
import json, pickle, sys
from pathlib import Path

folder, asked = Path(sys.argv[1]), json.loads(sys.argv[2])
vllm_config = pickle.loads((folder / "config").read_bytes())

from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm import SamplingParams
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

spec = pickle.loads((folder / "spec").read_bytes())
cache = vllm_config.cache_config
cache.num_gpu_blocks = cache.num_gpu_blocks_override
kv_cache_config = KVCacheConfig(cache.num_gpu_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
block_size, hash_block_size = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
scheduler = vllm_config.scheduler_config.get_scheduler_cls()(
    vllm_config, kv_cache_config, StructuredOutputManager(vllm_config), block_size, hash_block_size
)
(manager,) = scheduler.kv_cache_manager.coordinator.single_type_managers
null = manager.block_pool.null_block
limits, messages, gaps = {}, [], []
for name, (prompt_length, extra_args) in asked.items():
    params = SamplingParams(max_tokens=40, ignore_eos=True, extra_args=extra_args)
    params.update_from_generation_config({}, eos_token_id=2)
    scheduler.add_request(Request(name, list(range(3, 3 + prompt_length)), params, None))
    limits[name] = manager.requests.of(name)
while scheduler.has_unfinished_requests():
    output = scheduler.schedule()
    messages.append(pickle.dumps(output))
    ids = list(output.num_scheduled_tokens)
    gaps.append({name: sum(block is null for block in manager.req_to_blocks[name]) for name in ids})
    # One token of an answer wherever everything before it is computed.
    requests = [scheduler.requests[name] for name in ids]
    tokens = [[7] if r.num_computed_tokens >= r.num_tokens else [] for r in requests]
    index = {name: i for i, name in enumerate(ids)}
    scheduler.update_from_output(output, ModelRunnerOutput(ids, index, tokens))
(folder / "messages").write_bytes(pickle.dumps(messages))
print(json.dumps({"policy": scheduler.policy.to_dict(), "limits": limits, "gaps": gaps}))
"""

REQUESTS: dict[str, tuple[int, dict[str, Any] | None]] = {
    "plain": (700, None),
    "short": (40, None),
    "smaller": (400, {"kv_budget": 128}),
    "pinned": (500, {"kv_pin_tokens": 100}),
    "whole": (600, {"kv_policy": "none"}),
    # Front ends refuse it. Whoever goes around them gets the policy's own limits, in every process.
    "unchecked": (600, {"kv_budget": 9999}),
}


def python(script: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"}
    environment.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would win over what the configuration says
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def output_of(process: subprocess.Popen[str], line: str = "") -> str:
    stdout, stderr = process.communicate(line, timeout=200)
    assert process.returncode == 0, stdout[-2000:] + stderr[-4000:]
    return stdout


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    while not path.exists():
        try:
            process.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(output_of(process))


@pytest.mark.slow
def test_three_processes_agree(tmp_path: Path) -> None:
    """Front end, scheduler and worker, each in a process that the others never ran in."""
    output_of(python(_FRONT_END, str(tmp_path), MODEL))
    worker = python(_WORKER, str(tmp_path))
    try:
        wait_for(tmp_path / "spec", worker)
        scheduler_said = json.loads(output_of(python(_SCHEDULER, str(tmp_path), json.dumps(REQUESTS))))
        worker_said = json.loads(output_of(worker, "\n"))
    finally:
        worker.kill()

    resolved = pickle.loads((tmp_path / "config").read_bytes()).additional_config
    policy = KVPolicyConfig.from_additional_config(resolved)
    assert policy is not None
    assert policy.to_dict() == scheduler_said["policy"] == worker_said["policy"]
    of_policy = RequestLimits.of_policy(policy)._replace(prompt_budget_tokens=512)
    expected = {
        "plain": of_policy._replace(num_prompt_tokens=700),
        "short": of_policy._replace(num_prompt_tokens=40),
        "smaller": of_policy._replace(budget_tokens=128, num_prompt_tokens=400),
        "pinned": of_policy._replace(pinned_blocks=4, num_prompt_tokens=500),
        "whole": RequestLimits(policy.no_budget_tokens, 1),
        "unchecked": of_policy._replace(num_prompt_tokens=600),
    }
    assert scheduler_said["limits"] == worker_said["limits"] == {k: list(v) for k, v in expected.items()}
    assert worker_said["gaps"] == scheduler_said["gaps"]
    most = {name: max(step.get(name, 0) for step in worker_said["gaps"]) for name in REQUESTS}
    assert most.pop("short") == most.pop("whole") == 0
    assert all(most.values()), most
