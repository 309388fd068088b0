"""Engines that lie in one known way, for tests of whatever claims to notice.

    forge = Forge(transport.fetch, digest)
    engine = plant(build(fetch=forge), "stale_head", seed=0, forge=forge)

A lying engine is built in code only: no configuration names one.
"""

from trueup.engines.lying.engine import LyingEngine
from trueup.engines.lying.forge import Forge
from trueup.engines.lying.table import FAULTS, Fault, plant, planting
from trueup.engines.lying.untied import untied

__all__ = ["FAULTS", "Fault", "Forge", "LyingEngine", "plant", "planting", "untied"]
