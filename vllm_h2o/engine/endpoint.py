"""HTTP routes that show what the policy does: a plugin of vLLM's group ``vllm.endpoint_plugins``.

vLLM loads it only where ``VLLM_PLUGINS`` names it. Its data is behind the server's API key, and holds lengths
of requests, never their text or ids.
"""

import asyncio
import time
from argparse import Namespace
from importlib.metadata import version
from importlib.resources import files
from typing import Any

import torch
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.responses import HTMLResponse
from vllm import __version__ as vllm_version
from vllm import envs
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware
from vllm.v1.metrics.prometheus import get_prometheus_registry

from vllm_h2o.config import KVPolicyConfig
from vllm_h2o.engine.compat import VllmConfig, current_platform
from vllm_h2o.engine.metrics import PREFIX
from vllm_h2o.engine.refusals import refuse_engine
from vllm_h2o.errors import RefusedError
from vllm_h2o.request_limits import FIELDS, ranges
from vllm_h2o.settings import KVPolicySettings

STATS_SECONDS = 0.5
"""Statistics are at most this old, and engines are asked at most this often, however many clients ask."""


class KVPolicyEndpoint:
    """``GET /kv_policy``, ``/kv_policy/stats`` and ``/kv_policy/view``."""

    name = "kv_policy"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._client: Any = None
        self._tokens: list[str] = []
        self._stats: dict[str, Any] = {}
        self._stats_at = -STATS_SECONDS
        self._asking = asyncio.Lock()

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes."""
        router = APIRouter(prefix="/kv_policy", tags=["kv_policy"])
        guarded = [Depends(self._check_key)]
        router.add_api_route("", self.describe, dependencies=guarded)
        router.add_api_route("/stats", self.stats, dependencies=guarded)
        # The page holds no data; it asks for the key and sends it to the route above.
        router.add_api_route("/view", self.view, response_class=HTMLResponse)
        app.include_router(router)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Keep the way to the engine, and the keys that vLLM's own routes want."""
        self._client = engine_client
        self._tokens = [key for key in (args.api_key or [envs.VLLM_API_KEY]) if key]

    def _check_key(self, request: Request) -> None:
        # vLLM's own check covers paths with its prefixes only.
        if self._tokens and not AuthenticationMiddleware(request.app, self._tokens).verify_token(
            request.headers
        ):
            raise HTTPException(401, "Unauthorized")

    async def describe(self) -> dict[str, Any]:
        """The policy in force, or why there can't be one."""
        vllm_config: VllmConfig = self._client.vllm_config
        policy = KVPolicyConfig.from_additional_config(vllm_config.additional_config)
        found: dict[str, Any] = {
            "active": policy is not None,
            "versions": {
                "vllm-h2o": version("vllm-h2o"),
                "vllm": vllm_version,
                "torch": torch.__version__,
            },
        }
        if policy is None:
            return {**found, "refusals": _refusals(vllm_config)}
        settings = {name: value for name, value in policy.to_dict().items() if value is not None}
        allowed = policy.evicts and not current_platform.is_cuda()
        limits = {"fields": list(FIELDS), **(ranges(policy) if allowed else {})}
        return {**found, "evicts": policy.evicts, "policy": settings, "request_limits": limits}

    async def stats(self) -> dict[str, Any]:
        """Counters and gauges, summed over engines, and how much of each running request is held."""
        async with self._asking:
            if time.monotonic() - self._stats_at >= STATS_SECONDS:
                self._stats_at = time.monotonic()
                self._stats = {**_sums(), "requests": await self._requests(), "time": time.time()}
        return self._stats

    async def view(self) -> HTMLResponse:
        """A page that draws the statistics."""
        return HTMLResponse(files("vllm_h2o.engine").joinpath("view.html").read_text(encoding="utf-8"))

    async def _requests(self) -> list[dict[str, int]]:
        """Of the first engine, and its first rank: all ranks hold the same numbers of tokens."""
        policy = KVPolicyConfig.from_additional_config(self._client.vllm_config.additional_config)
        if policy is None:
            return []
        ranks = await self._client.collective_rpc("kv_policy_requests")
        return [{"live_tokens": live, "evicted_tokens": evicted} for live, evicted in ranks[0]]


def _sums() -> dict[str, float]:
    """Our metrics without their prefix, over all engines; none where there is no policy."""
    sums: dict[str, float] = {}
    for metric in get_prometheus_registry().collect():
        for sample in metric.samples if metric.name.startswith(PREFIX) else ():
            name = sample.name.removeprefix(PREFIX)
            if "le" not in sample.labels and not name.endswith("_created") and name != "info":
                sums[name] = sums.get(name, 0) + sample.value
    return sums


def _refusals(vllm_config: VllmConfig) -> list[str]:
    try:
        refuse_engine(vllm_config, KVPolicySettings(name="h2o"), None)
    except RefusedError as error:
        return [str(refusal) for refusal in error.refusals]
    return []
