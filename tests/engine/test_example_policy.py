"""The example of docs/writing-a-policy.md: installed as a package of its own, and run by an engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.engines import complete, engine, greedy

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "example-policy"

GENERATE = """
import json, sys
from tests.engines import complete, engine, greedy

if __name__ == "__main__":
    prompt = json.load(sys.stdin)
    with engine(policy={"name": "forgetful", "budget": 128}) as llm:
        print("tokens:", json.dumps(complete(llm, [prompt], greedy(64))[0].token_ids))
"""


def test_the_page_shows_the_example_as_it_is() -> None:
    page = (ROOT / "docs" / "writing-a-policy.md").read_text(encoding="utf-8")
    blocks = [part.split("```")[0] for part in page.split("```python\n")[1:]]
    blocks += [part.split("```")[0] for part in page.split("```toml\n")[1:]]
    assert len(blocks) == 2
    example = "".join(path.read_text(encoding="utf-8") for path in sorted(EXAMPLE.glob("*.*")))
    lines = {line.strip() for line in example.splitlines()}
    for block in blocks:
        assert {line.strip() for line in block.splitlines()} <= lines


def test_an_installed_policy_serves(tmp_path: Path, text_ids: list[int]) -> None:
    # A copy, as building leaves files beside the sources.
    source, target = tmp_path / "source", tmp_path / "installed"
    source.mkdir()
    for path in EXAMPLE.glob("*.*"):
        (source / path.name).write_bytes(path.read_bytes())
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True)
    done = subprocess.run(
        [sys.executable, "-c", GENERATE],
        input=json.dumps(text_ids[:300]),
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(target), str(ROOT)])},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("tokens: ")]
    # It is the same sum as h2o's with a half-life, which other tests compare with the oracle.
    policy = {"name": "h2o", "budget": 128, "recent": 16, "score_half_life": 64, "score_pool": 5}
    policy["score_rank"] = "sum"
    with engine(policy=policy) as llm:
        same = complete(llm, [text_ids[:300]], greedy(64))[0].token_ids
    assert json.loads(line.removeprefix("tokens: ")) == same
