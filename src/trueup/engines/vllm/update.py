"""The halves of an update: a version is staged while vLLM decodes, and swapped in a pause."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trueup.engines.vllm.client import Client
from trueup.errors import EngineFault, TransportFault, TrueupError, from_dict
from trueup.types import WeightManifest

_POLL_S = 0.005
_STAGED_S = 300.0
"""Longest time to read and verify a version."""


async def stage(client: Client, manifest: WeightManifest, quantize: str) -> Mapping[str, Any]:
    """Have the workers read and verify a version.

    Args:
        client: Of the server.
        manifest: Of the version.
        quantize: What workers do to it, see `Extension.trueup_stage`.

    Returns:
        `digest` of the tensors that they received, and `prepare_s`.

    Raises:
        TransportFault: It did not verify, or not in time.
    """
    await client.call("trueup_stage", json.dumps(asdict(manifest)), quantize)
    field = f"version {manifest.version}"
    until = time.monotonic() + _STAGED_S
    while True:
        staged = await client.call("trueup_staged")
        if error := staged.get("error"):
            raise _as_transport_fault(from_dict(error))
        if staged["digest"]:
            break
        if time.monotonic() > until:
            raise TransportFault(
                field=field, rule=f"verified within {_STAGED_S:g} s", value="no end"
            )
        await asyncio.sleep(_POLL_S)
    if staged["digest"] != manifest.digest:
        raise TransportFault(field=f"{field}: digest", rule=manifest.digest, value=staged["digest"])
    return staged


async def swap(client: Client, version: int, *, running: Sequence[str], keep: bool) -> int:
    """Replace the weights by the staged ones and deal with the caches; the scheduler is paused.

    Args:
        client: Of the server.
        version: The staged one, which labels what is sampled from now on.
        running: Ids of the turns in flight.
        keep: They keep their keys and values; what else is cached then stays where it is too.

    Returns:
        Tokens of running turns to compute again.

    Raises:
        EngineFault: A step failed, or did not do what it says.
    """
    await client.update(version)
    again = 0
    if not keep:
        again = int((await client.call("trueup_cached", json.dumps(list(running))))["tokens"])
    if not await client.reset_cache(running=not keep) and not keep:
        raise EngineFault(field="vLLM prefix cache", rule="reset", value="still in use")
    label = await client.weight_version()
    if label != str(version):
        raise EngineFault(field="vLLM weight version", rule=str(version), value=label)
    return again


def _as_transport_fault(error: TrueupError) -> TransportFault:
    if isinstance(error, TransportFault):
        return error
    return TransportFault(error.message, field=error.field, rule=error.rule, value=error.value)
