"""Starts a `vllm serve`, shows the part of its log that matters, and stops it again.

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from server_log import ServerLog

HOST = "127.0.0.1"

_HEARTBEAT_SECONDS = 10.0
_POLL_SECONDS = 0.25
# vLLM lets running requests end and its engine process leave; on two busy cores that takes a while.
_STOP_SECONDS = 30.0


class ServerError(Exception):
    """The server did not start or stopped by itself; the message says what it printed."""


def free_port() -> int:
    """Return a TCP port on loopback that nothing listens on right now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def check_port(port: int) -> None:
    """Raise ServerError if `port` can't be listened on."""
    with socket.socket() as probe:
        # As the server does, so that a port which just went out of use counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError) as error:
            raise ServerError(
                f"--port {port} can't be used ({error}). Leave --port out to take a free one."
            ) from error


class Server:
    """A server process and its log file; as a context manager it is stopped on the way out."""

    def __init__(
        self, command: list[str], *, port: int, log_path: Path, environment: Mapping[str, str]
    ) -> None:
        self.url = f"http://{HOST}:{port}"
        self._log = ServerLog(log_path)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("wb") as log:
            # A session of its own, so that Ctrl-C in the terminal reaches this script alone, which
            # then stops the server in order.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id of the API server, the parent of the engine's process."""
        return self._process.pid

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def wait_until_ready(self, timeout_seconds: float) -> float:
        """Return how many seconds it took until the server answered; show its log meanwhile."""
        started = time.monotonic()
        shown_at = started
        while not self._is_healthy():
            now = time.monotonic()
            if self._log.show_new_lines():
                shown_at = now
            self.check_running("while starting")
            if now - started > timeout_seconds:
                raise ServerError(
                    f"the server did not answer within {timeout_seconds:.0f} s.\n{self._log.failure()}"
                )
            if now - shown_at > _HEARTBEAT_SECONDS:
                print(f"  | ... still starting ({now - started:.0f} s)", flush=True)
                shown_at = now
            time.sleep(_POLL_SECONDS)
        self._log.show_new_lines()
        return time.monotonic() - started

    def check_running(self, when: str) -> None:
        """Raise ServerError with the end of the log if the server has exited."""
        status = self._process.poll()
        if status is not None:
            raise ServerError(f"the server exited {when} (status {status}).\n{self._log.failure()}")

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait until the server exits by itself, which is a ServerError, as is waiting for longer."""
        try:
            self._process.wait(timeout_seconds)
        except subprocess.TimeoutExpired as error:
            raise ServerError(f"the server still runs after {timeout_seconds} s.") from error
        self.check_running("while serving")

    def stop(self) -> None:
        """Stop the server and the processes it started, and wait until they are gone."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                print(f"The server did not stop within {_STOP_SECONDS:.0f} s; ending it", flush=True)
        # Its engine is a process of its own, which a server that crashed or hung leaves behind.
        # Both are in the session that was made for this server, so nothing else is meant by this.
        # Usually nothing is left.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                healthy: bool = response.status == 200
                return healthy
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            return False  # not listening yet; a server that has exited is told by check_running
