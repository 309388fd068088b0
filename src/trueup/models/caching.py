"""The argument by which a transformers module takes its cache of keys and values."""

from __future__ import annotations

import inspect
from typing import Any


def cache_argument(module: Any) -> str:
    """`cache`, or `past_key_values` where the installed version still calls it so."""
    accepted = inspect.signature(module.forward).parameters
    return "cache" if "cache" in accepted else "past_key_values"
