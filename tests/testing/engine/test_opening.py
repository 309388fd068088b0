import asyncio
import json
from pathlib import Path

import pytest

from support.lying import peaked
from trueup.engines.scripted import Reply, ScriptedEngine, refuse
from trueup.errors import TransportFault, UsageError
from trueup.models.load import save_model
from trueup.testing.engine.opening import Options, open_subject
from trueup.testing.engine.table import CHECKS


def options(engine, **more) -> Options:
    given = {"kind": "", "precision": "float32", "model": None, "vocab_size": None}
    return Options(engine=engine, **(given | more))


def builds(engine):
    return lambda config, **_: engine


def scripted(**more) -> ScriptedEngine:
    return ScriptedEngine(lambda asked: Reply(token_ids=(1,), logps=(-1.0,)), **more)


def opened(given: Options, directory: Path):
    return asyncio.run(open_subject(given, directory))


def test_an_engine_that_takes_weights_gets_those_of_the_model(tmp_path):
    save_model(peaked(), tmp_path / "model")
    engine = scripted()
    subject = opened(options(builds(engine), model=tmp_path / "model"), tmp_path)
    (manifest,) = [said for name, said in engine.calls if name == "load"]
    assert subject.publisher is not None
    assert manifest.digest == subject.publisher.transport.publish(9, subject.scorer.base).digest
    assert (subject.vocabulary, subject.info.version) == (40, manifest.version)


def test_an_engine_that_refuses_the_weights_is_closed(tmp_path):
    save_model(peaked(), tmp_path / "model")
    engine = scripted(verify=refuse(1))
    with pytest.raises(TransportFault):
        opened(options(builds(engine), model=tmp_path / "model"), tmp_path)
    assert engine.calls[-1] == ("close", None)


@pytest.mark.parametrize(("eos", "stop"), [(3, 3), ([5, 6], 5), (None, 39), ([], 39)])
def test_replies_may_stop_at_the_end_of_text_or_at_the_last_id(tmp_path, eos, stop):
    config = {"vocab_size": 40, "eos_token_id": eos}
    (tmp_path / "config.json").write_text(json.dumps(config))
    subject = opened(options(builds(scripted()), model=tmp_path), tmp_path)
    assert subject.stop_id == stop
    assert subject.scorer is subject.publisher is None


def test_a_vocabulary_of_one_word_is_refused(tmp_path):
    with pytest.raises(UsageError, match="vocab-size"):
        opened(options(builds(scripted()), vocab_size=1), tmp_path)


def test_checks_have_names_of_their_own():
    assert len({check.name for check in CHECKS}) == len(CHECKS)
