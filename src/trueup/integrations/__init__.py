"""Bridges to other frameworks: corrections and diagnostics inside the trainer that people have.

`apply` is the generic one: the advantages of any trainer in, weighted ones out.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trueup.integrations.padded import Applied, apply

__all__ = ["Applied", "apply"]


def __getattr__(name: str) -> Any:
    """Load torch only for those who ask: readers of dumps need none."""
    if name in __all__:
        from trueup.integrations import padded

        return getattr(padded, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
