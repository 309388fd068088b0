import pytest

from trueup.errors import ConfigError
from trueup.experiments.table import EXPERIMENTS, find


def test_names_and_aliases_are_distinct():
    names = [name for e in EXPERIMENTS for name in (e.name, *e.aliases)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda e: e.name)
def test_every_experiment_can_be_loaded_by_each_of_its_names(experiment):
    for name in (experiment.name, *experiment.aliases):
        assert find(name) is experiment
    assert callable(experiment.load())


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'estimator-table'"):
        find("estimatortable")
