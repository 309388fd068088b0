"""What the probe after every load costs of a TinyAgent step.

Trains a few steps without probes for the length of a step, then decodes and scores the default
probe set on the same model in this process: the engine's share runs beside the trainer's steps, the
trainer's between two of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from trueup import config
from trueup.engines.embedded.core import EmbeddedCore
from trueup.engines.embedded.engine import EmbeddedEngine
from trueup.models.load import load_model
from trueup.records.ledger import Ledger
from trueup.sync.digest import digest
from trueup.sync.inprocess import InProcessTransport
from trueup.training.inspector import measure
from trueup.training.probe import ProbeSet, decode
from trueup.training.run import train
from trueup.training.runtime_local import base_model
from trueup.training.trainer import TorchTrainer

REPEATS = 15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    settings = config.load("", [f"train.steps={arguments.steps}", "eval.samples=0"])
    period_s = _period_s(settings)
    decode_s, score_s = asyncio.run(_probe_s(settings))
    result = {
        "name": "probe",
        "ratios": {
            "probe.trainer_share": score_s / period_s,
            "probe.engine_share": decode_s / period_s,
        },
        "figures": {
            "period_ms": period_s * 1e3,
            "score_ms": score_s * 1e3,
            "decode_alone_ms": decode_s * 1e3,
        },
    }
    if arguments.json:
        print(json.dumps(result))
        return
    print(f"a step every {period_s * 1e3:.0f} ms without probes")
    print(f"  the trainer scores one in {score_s * 1e3:.1f} ms: {score_s / period_s:.1%}")
    print(f"  an idle engine decodes one in {decode_s * 1e3:.1f} ms: {decode_s / period_s:.1%}")


def _period_s(settings: config.Config) -> float:
    quiet = settings.model_copy(update={"probe": config.ProbeConfig(every=0)})
    with tempfile.TemporaryDirectory() as folder:
        train(quiet, Path(folder), "bench")
        ledger = Ledger.open(Path(folder) / "bench" / "run.db", readonly=True)
        ends = [event.payload["t1"] for event in ledger.events(("train",))]
        ledger.close()
    return median(b - a for a, b in pairwise(ends[1:]))


async def _probe_s(settings: config.Config) -> tuple[float, float]:
    """Medians of the seconds that engine and trainer spend on one probe."""
    torch.set_num_threads(1)
    path = base_model(settings)
    model, transport = load_model(path), InProcessTransport()
    trainer = TorchTrainer(model, settings.train, temperature=1.0, seed=0)
    core = EmbeddedCore(path, engine_id="e", slots=16, fetch=transport.fetch, digest=digest)
    engine = EmbeddedEngine(core)
    probes = ProbeSet.load(settings, path)
    assert probes is not None
    decoding, scoring = [], []
    await engine.load(transport.publish(0, trainer.export()))
    for repeat in range(REPEATS):
        start = time.perf_counter()
        episodes = await decode(engine, probes, name=f"p{repeat}")
        middle = time.perf_counter()
        measure(episodes, trainer.score, newest=0)
        decoding.append(middle - start)
        scoring.append(time.perf_counter() - middle)
    await engine.close()
    return median(decoding), median(scoring)


if __name__ == "__main__":
    main()
