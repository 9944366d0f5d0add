"""Picks what a person wants to know out of the log of `vllm serve`."""

from __future__ import annotations

import re
from pathlib import Path

# "(EngineCore pid=7775) INFO 11-30 22:29:54 [core.py:133] Initializing ...": who and where is left
# out of what is shown.
_PREFIX = re.compile(r"^\(\w+ pid=\d+\) (?:[A-Z]+ \S+ \S+ \[[^\]]*\] |INFO: +)?")
# The start-up log runs to about a hundred lines; these say how far it is, or come from the plugin.
_WORTH_SHOWING = re.compile(
    r"^KV policy|\bH2O\b|^Resolved architecture|^Initializing a V1|^Starting to load model|"
    r"^Loading weights took|KV cache size|^init engine|^Starting vLLM|^Application startup complete"
)
_ERROR = re.compile(r"^(?:[\w.]*(?:Error|Exception|Exit)|vllm\b.*: error): ")
_SHOWN_CHARACTERS = 150
_TAIL_LINES = 15
_MOST_ERRORS = 5


def message(line: str) -> str:
    """Return a line of the log without the process, time and place at its start."""
    return _PREFIX.sub("", line, count=1)


class ServerLog:
    """A server's log file, read bit by bit while the server writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0

    def show_new_lines(self) -> bool:
        """Print what is new and worth showing; return whether there was any."""
        with self.path.open("rb") as log:
            log.seek(self._position)
            # A line that is still being written is left for the next time.
            fresh, newline, _ = log.read().rpartition(b"\n")
        self._position += len(fresh) + len(newline)
        messages = [message(line) for line in fresh.decode(errors="replace").splitlines()]
        shown = [text for text in messages if _WORTH_SHOWING.search(text)]
        for text in shown:
            cut = text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + " ..."
            print(f"  | {cut}", flush=True)
        return bool(shown)

    def failure(self) -> str:
        """Return the errors in the log, first ones first, and its end.

        vLLM's processes each report the failure of the one below them, so that the end of the log
        alone hardly ever says what went wrong.
        """
        lines = self.path.read_text(errors="replace").splitlines()
        found = (text for text in map(message, lines) if _ERROR.match(text))
        errors = list(dict.fromkeys(found))[:_MOST_ERRORS]
        parts = [f"The whole log is in {self.path}."]
        if errors:
            parts += ["Errors in it, the first one likely the cause:", *_indented(errors)]
        parts += ["Its end:", *_indented(lines[-_TAIL_LINES:])]
        return "\n".join(parts)


def _indented(lines: list[str]) -> list[str]:
    return [f"  | {line}" for line in lines]
