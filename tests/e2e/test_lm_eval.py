"""lm-eval against `vllm serve --kv-policy h2o`, with the files of configs/lm-eval and data made here."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.servers import ENVIRONMENT, MODEL, Server

pytestmark = pytest.mark.e2e

CONFIGS = Path(__file__).parents[2] / "configs" / "lm-eval"
NUM_DOCS, NUM_FEWSHOT = 4, 5
COLOURS = ("red", "blue", "green", "white", "black")


def choices(draw: random.Random) -> dict[str, Any]:
    """As PiQA has it: a goal, two solutions, and which one is right."""
    first, second = draw.sample(COLOURS, 2)
    label = draw.randrange(2)
    said = " ".join(f"The door is {(first, second)[label]}." for _ in range(8))
    return {"goal": f"{said} What colour is the door?", "sol1": first, "sol2": second, "label": label}


def article(draw: random.Random) -> dict[str, str]:
    """As XSUM has it: a document and a summary of one sentence."""
    colour = draw.choice(COLOURS)
    sentences = [f"The house number {n} is {colour}." for n in range(30)]
    return {"document": " ".join(sentences), "summary": f"All houses are {colour}."}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The paper's formats, with local files in place of downloads."""
    folder = tmp_path_factory.mktemp("tasks")
    draw = random.Random(0)
    for name, make in (("choices", choices), ("articles", article)):
        docs = [json.dumps(make(draw)) for _ in range(NUM_DOCS + NUM_FEWSHOT)]
        (folder / f"{name}-test.json").write_text("\n".join(docs[:NUM_DOCS]), encoding="utf-8")
        (folder / f"{name}-train.json").write_text("\n".join(docs[NUM_DOCS:]), encoding="utf-8")

    def data(name: str) -> dict[str, Any]:
        files = {split: str(folder / f"{name}-{split}.json") for split in ("test", "train")}
        return {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": files},
            "training_split": "train",
            "validation_split": None,
            "test_split": "test",
            "fewshot_split": "train",
        }

    for name, base, source in (
        ("local_choices", "piqa.yaml", "choices"),
        ("local_articles", str(CONFIGS / "tasks" / "xsum.yaml"), "articles"),
    ):
        content = {"include": base, "task": name, **data(source)}
        if name == "local_articles":
            content["generation_kwargs"] = {"until": ["\n"], "max_gen_toks": 16, "do_sample": False}
        if name == "local_choices":
            content |= {
                "include": None,
                "output_type": "multiple_choice",
                "doc_to_text": "Question: {{goal}}\nAnswer:",
                "doc_to_target": "label",
                "doc_to_choice": "{{[sol1, sol2]}}",
                "metric_list": [{"metric": "acc"}],
            }
        content = {key: value for key, value in content.items() if value is not None}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def lm_eval_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("lm-eval") / "server.log"
    with Server(log, "--config", str(CONFIGS / "serve.yaml"), "--dtype", "float32") as server:
        yield server


def test_the_papers_formats_run_through_a_server_that_evicts(
    lm_eval_server: Server, tasks: Path, tmp_path: Path
) -> None:
    config = yaml.safe_load((CONFIGS / "paper-tasks.yaml").read_text(encoding="utf-8"))
    config["model_args"] |= {
        "model": "smollm2",
        "tokenizer": MODEL,
        "base_url": f"{lm_eval_server.url}/v1/completions",
        "num_concurrent": 4,
    }
    config |= {
        "tasks": ["local_choices", "local_articles"],
        "include_path": str(tasks),
        "output_path": str(tmp_path / "out"),
        "log_samples": True,
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", "run", "--config", str(tmp_path / "config.yaml")],
        env={
            **ENVIRONMENT,
            "PATH": "/usr/bin:/bin",
            "HF_DATASETS_CACHE": str(tmp_path),
            "HOME": str(tmp_path),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    (path,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(path.read_text(encoding="utf-8"))
    assert results["n-samples"]["local_choices"]["effective"] == NUM_DOCS
    # A fact that is in the question is answered, five examples before it or not.
    assert results["results"]["local_choices"]["acc,none"] >= 0.75
    assert 0 < results["results"]["local_articles"]["rouge1,none"] <= 1
    # Prompts were over the budget, or nothing has been shown.
    longest = max(len(text) for text in _prompts(tmp_path / "out"))
    assert longest / 4 > 256, longest


def _prompts(folder: Path) -> Iterator[str]:
    for path in folder.rglob("samples_*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)["arguments"]["gen_args_0"]["arg_0"]
