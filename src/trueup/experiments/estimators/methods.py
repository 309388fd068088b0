"""What the lab compares: every preset of the table, the published four first."""

from __future__ import annotations

from collections.abc import Mapping

from trueup.corrections.table import find
from trueup.simulation.estimator import METHODS, Method

PUBLISHED: Mapping[str, Method] = {
    "none": METHODS["none"],
    "is": METHODS["is"],
    "tis": Method(preset=find("tis"), params={"cap": 2.0}),
    "mis": Method(preset=find("mis"), params={"low": 0.5, "high": 5.0}),
}
"""The four columns of the source, in its order, with its constants."""

OTHERS: Mapping[str, Method] = {
    name: method for name, method in METHODS.items() if name not in PUBLISHED
}
"""All other presets with their own constants."""
