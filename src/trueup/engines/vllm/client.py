"""Talk to a vLLM server: token ids in, token ids out, and the calls that change its weights.

Every call but `generate` has a time-out: after an update that went wrong, vLLM 0.32 answers no
control call at all. How long a turn may take is not known beforehand; whether the engine still
answers is what the adapter watches while turns run (`weight_version` asks the engine's loop).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from trueup.engines.vllm import wire
from trueup.engines.vllm.facts import ServerFacts, facts_of
from trueup.errors import ConfigError, EngineFault

if TYPE_CHECKING:
    import httpx2

UPDATE_S = 300.0
"""A call that waits for running turns or loads weights."""


class Client(Protocol):
    """What the adapter needs of vLLM, over HTTP or in process."""

    async def facts(self) -> ServerFacts:
        """The configuration it runs with."""
        ...

    async def generate(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """One turn: a request and a response of `/inference/v1/generate`."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a turn; it answers with what it has."""
        ...

    async def pause(self, mode: str) -> None:
        """Stop stepping: `keep` freezes what runs, `wait` lets it end, `abort` ends it."""
        ...

    async def resume(self) -> None:
        """Step again."""
        ...

    async def update(self, version: int) -> None:
        """Replace the weights by the staged version, and label what is sampled from now on."""
        ...

    async def reset_cache(self, *, running: bool) -> bool:
        """Forget cached prefixes; false if running turns hold some.

        Args:
            running: Those of running turns too, which are then computed again.
        """
        ...

    async def weight_version(self) -> str:
        """The label of the weights, answered by the engine's own loop."""
        ...

    async def call(self, method: str, *arguments: str) -> Mapping[str, Any]:
        """A method of our extension, on the first worker."""
        ...

    async def close(self) -> None:
        """Hang up."""
        ...


class HttpClient:
    """Implements `Client` over HTTP.

    Args:
        url: Where the server listens.
        socket: A Unix socket to reach it by; the URL then only names it.
        token: Bearer token; empty: none.
        why_ended: Says why the server has ended, or "" if that is not known.
        call_s: Time-out of a control call that does not move weights.
    """

    def __init__(
        self,
        url: str,
        *,
        socket: str = "",
        token: str = "",
        why_ended: Callable[[], str] = lambda: "",
        call_s: float = 60.0,
    ) -> None:
        """Connect when first needed."""
        try:
            import httpx2
        except ImportError as error:
            raise ConfigError(
                field="engine.kind", rule="vllm with trueup[vllm] installed", value=str(error)
            ) from error
        self._http = httpx2
        self._url = url
        self._why_ended = why_ended
        self._call_s = call_s
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
        self._session = httpx2.AsyncClient(
            base_url=url,
            transport=httpx2.AsyncHTTPTransport(
                uds=socket or None, limits=limits, verify=url.startswith("https:")
            ),
            headers={"Authorization": f"Bearer {token}"} if token else {},
            trust_env=False,
        )

    async def facts(self) -> ServerFacts:
        """See `Client.facts`.

        Raises:
            ConfigError: It does not say: it was not started with VLLM_SERVER_DEV_MODE=1.
        """
        try:
            # It looks around its machine for the answer, for seconds.
            answer = await self._answer("GET", "/server_info?config_format=json", None, UPDATE_S)
        except EngineFault as fault:
            if fault.value != 404:
                raise
            raise ConfigError(
                field=f"vLLM at {self._url}",
                rule="started with VLLM_SERVER_DEV_MODE=1, which opens what updates need",
                value="no /server_info",
            ) from fault
        return facts_of(answer["vllm_config"])

    async def generate(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """See `Client.generate`; no time-out."""
        return await self._answer("POST", "/inference/v1/generate", request, None)

    async def abort(self, request_id: str) -> None:
        """See `Client.abort`."""
        names = [f"{wire.REQUEST_PREFIX}{request_id}"]
        await self._post("/inference/v1/abort_requests", {"request_ids": names})

    async def pause(self, mode: str) -> None:
        """See `Client.pause`."""
        await self._post(f"/pause?mode={mode}&clear_cache=false", timeout_s=UPDATE_S)

    async def resume(self) -> None:
        """See `Client.resume`."""
        await self._post("/resume")

    async def update(self, version: int) -> None:
        """See `Client.update`."""
        await self._post("/start_weight_update", timeout_s=UPDATE_S)
        await self._post(
            "/update_weights", {"update_info": {"version": version}}, timeout_s=UPDATE_S
        )
        await self._post(
            "/finish_weight_update", {"weight_version": str(version)}, timeout_s=UPDATE_S
        )

    async def reset_cache(self, *, running: bool) -> bool:
        """See `Client.reset_cache`."""
        flag = str(running).lower()
        answer = await self._post(f"/reset_prefix_cache?reset_running_requests={flag}")
        return bool(answer["success"])

    async def weight_version(self) -> str:
        """See `Client.weight_version`."""
        return str((await self._get("/weight_info"))["weight_version"])

    async def call(self, method: str, *arguments: str) -> Mapping[str, Any]:
        """See `Client.call`."""
        answer = await self._post("/collective_rpc", {"method": method, "args": list(arguments)})
        first: Mapping[str, Any] = answer["results"][0]
        return first

    async def close(self) -> None:
        """See `Client.close`."""
        await self._session.aclose()

    async def _get(self, path: str) -> Mapping[str, Any]:
        return await self._answer("GET", path, None, self._call_s)

    async def _post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Mapping[str, Any]:
        return await self._answer("POST", path, body, timeout_s or self._call_s)

    async def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None
    ) -> Mapping[str, Any]:
        """One exchange.

        Raises:
            EngineFault: Unreachable, silent for too long, an error status (`value`), or no JSON.
        """
        name = f"vLLM {path.partition('?')[0]}"
        try:
            response = await self._session.request(method, path, json=body, timeout=timeout_s)
        except self._http.TimeoutException as error:
            raise EngineFault(
                field=name, rule=f"answered within {timeout_s:g} s", value="silence"
            ) from error
        except self._http.TransportError as error:
            why = self._why_ended() or repr(error)
            raise EngineFault(f"vLLM is gone: {why}", field=name, value=why) from error
        if response.status_code != 200:
            raise EngineFault(
                f"{name} answered {response.status_code}: {_complaint(response)}",
                field=name,
                value=response.status_code,
            )
        if not response.content:
            return {}
        try:
            answer = response.json()
        except ValueError as error:
            raise EngineFault(field=name, rule="answered in JSON", value=str(error)) from error
        if not isinstance(answer, dict):
            raise EngineFault(field=name, rule="answered by a JSON object", value=type(answer))
        return answer


def _complaint(response: httpx2.Response) -> str:
    """What a server says about an error: its `error.message`, or the start of its answer."""
    try:
        said = json.loads(response.content)["error"]
        return str(said["message"] if isinstance(said, dict) else said)
    except (ValueError, KeyError, TypeError):
        return response.text[:300]
