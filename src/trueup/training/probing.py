"""What follows a load: the engine decodes the probe set, the trainer judges, the ledger holds it.

It runs beside the episodes that the engine decodes meanwhile, and the trainer scores it between two
steps, so that neither waits for it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from trueup.config import ProbeConfig
from trueup.errors import EngineFault
from trueup.training.ports import LearnerPort, RolloutPort
from trueup.training.recorder import Recorder
from trueup.types import LoadReceipt


class Probing:
    """Probes engines after their loads.

    Args:
        settings: How often, and what an alarm does.
        rollout: Has engines decode.
        learner: Judges.
        recorder: Writes the ledger.
    """

    def __init__(
        self,
        settings: ProbeConfig,
        rollout: RolloutPort,
        learner: LearnerPort,
        recorder: Recorder,
    ) -> None:
        """No engine has loaded anything."""
        self._settings = settings
        self._rollout = rollout
        self._learner = learner
        self._recorder = recorder
        self._loads: Counter[int] = Counter()

    async def __call__(self, engine: int, receipt: LoadReceipt) -> None:
        """Follow up a load.

        Raises:
            EngineFault: It raised an alarm, and an alarm stops the run.
        """
        load = self._loads[engine]
        self._loads[engine] += 1
        every = self._settings.every
        episodes: tuple[str, ...] = ()
        failure = ""
        if every and load % every == 0:
            name = f"probe-{receipt.engine}-{receipt.epoch}-{load:06d}"
            try:
                episodes = await self._rollout.probe(engine, name)
            except EngineFault as fault:
                failure = fault.message
        report = await self._learner.probed(receipt, episodes)
        if failure:
            alarm = ("probe_decoded", f"the engine could not decode the probe: {failure}")
            report = replace(report, alarms=(*report.alarms, alarm))
        if report.tokens or report.alarms:
            self._recorder.probed(report)
        if report.alarms and self._settings.on_alarm == "stop":
            name, meaning = report.alarms[0]
            raise EngineFault(
                f"{receipt.engine}, version {receipt.version}: alarm {name}: {meaning}",
                field=receipt.engine,
                rule="a load without an alarm",
                value=name,
            )
