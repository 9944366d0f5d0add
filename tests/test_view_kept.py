"""The page that shows what was kept: its data, and the page itself in a browser where there is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import view_kept

PIECES = ["<b>", " one", " two", "\n", "</script>", " five", " é", " seven"]
STEPS = [(3, 0, 4), (3, 4, 1), (3, 5, 1), (3, 6, 1)]
KEPT: view_kept.Kept = [
    (0, "model.layers.0.attn", [[0, 1], [0, 2]], [[9.0, 9.0], [9.0, 9.0]]),
    (2, "model.layers.0.attn", [[0, 2, 5], [0, 4, 5]], [[0.5, 2.0, 1.0], [1.5, 3.0, 0.25]]),
    (2, "model.layers.7.attn", [[0, 4, 5], [0, 4, 5]], [[1.0, 2.0, 1.0], [1.0, 4.0, 1.0]]),
]


def data() -> dict[str, Any]:
    return view_kept.page_data(PIECES, 5, STEPS, KEPT, "a model, h2o: budget 3")


def test_counts_and_scores_are_those_of_the_last_compaction() -> None:
    found = data()
    assert (found["layers"], found["num_heads"], found["num_prompt_tokens"]) == ([0, 7], 2, 5)
    # Positions 6 and 7 came after it.
    assert found["kept"] == [[2, 0, 1, 0, 1, 2, 2, 2], [2, 0, 0, 0, 2, 2, 2, 2]]
    assert found["scores"] == [
        [1.0, None, 2.0, None, 3.0, 0.625, None, None],
        [1.0, None, None, None, 3.0, 1.0, None, None],
    ]


def test_a_policy_without_scores_has_no_curve() -> None:
    silent = [(s, name, heads, [[0.0] * 3] * 2) for s, name, heads, _ in KEPT[1:]]
    found = view_kept.page_data(PIECES, 5, STEPS, silent, "")
    assert found["scores"] == [[None] * 8] * 2


def test_nothing_dropped_is_said() -> None:
    with pytest.raises(ValueError, match=r"nothing was dropped from 8 tokens\. Give a lower"):
        view_kept.page_data(PIECES, 5, STEPS, [], "")


def test_text_cannot_break_out_of_its_place() -> None:
    text = view_kept.page(data())
    (inside,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert json.loads(inside) == data()
    # Nothing is loaded from anywhere.
    assert not re.search(r"(src|href)=|https?://|url\(", text)


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a browser: chromium")
def test_a_browser_shows_it(tmp_path: Path) -> None:
    page = tmp_path / "kept.html"
    page.write_text(view_kept.page(data()), encoding="utf-8")
    chromium = [
        *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
        *("--disable-sync", "--no-first-run", f"--user-data-dir={tmp_path / 'profile'}"),
    ]
    shown = subprocess.run(
        [*chromium, "--virtual-time-budget=3000", "--dump-dom", page.as_uri()],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        timeout=60,
    ).stdout
    spans = re.findall(r'<span( class="answer")? style="background-color: ([^"]*?);[^"]*">', shown)
    assert len(spans) == len(PIECES)
    assert [bool(answer) for answer, _ in spans] == [False] * 5 + [True] * 3
    # Kept by 4, 0, 1, 0, 3, 4, 4 and 4 of 4 pairs.
    shades = [re.search(r"([\d.]+)\)$", colour)[1] for _, colour in spans]  # type: ignore[index]
    assert [float(shade) for shade in shades][1:5] == [0.0, 0.25, 0.0, 0.75]
    assert "&lt;/script&gt;" in shown
    assert '<option value="1">7</option>' in shown
