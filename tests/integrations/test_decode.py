import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from trueup.errors import EngineFault
from trueup.integrations.decode import DecodeLogps

EOS, PAD = 1, 0


class Bigram(nn.Module):
    """Logits of the next id depend on the last one only; row i of the table is `log` probs."""

    def __init__(self, table):
        super().__init__()
        self.table = nn.Parameter(torch.tensor(table).log())

    def forward(self, input_ids):
        return SimpleNamespace(logits=self.table[input_ids])

    def generate(self, prompts, sampled):
        """As `generate` does: the whole prompt first, then one id at a time."""
        self(input_ids=torch.tensor(prompts))
        for column in zip(*sampled, strict=True):
            last = torch.tensor(column)[:, None]
            if len(self.seen) + 1 < len(sampled[0]):
                self(input_ids=last)
            self.seen.append(column)

    seen: list


def model():
    made = Bigram([[0.25, 0.25, 0.5], [0.25, 0.25, 0.5], [0.125, 0.375, 0.5]])
    made.seen = []
    return made


def test_log_probs_are_those_of_each_step_and_end_with_the_completion():
    engine = model()
    with DecodeLogps(engine, temperature=1.0) as recorded:
        engine.generate([[2, 0], [0, 2]], [[2, 2, EOS], [EOS, PAD, PAD]])
    found = recorded.of([[2, 2, EOS], [EOS]])
    assert found[0] == pytest.approx([math.log(0.5), math.log(0.5), math.log(0.375)])
    assert found[1] == pytest.approx([math.log(0.375)])


def test_logits_are_divided_by_the_temperature():
    engine = model()
    with DecodeLogps(engine, temperature=0.5) as recorded:
        engine.generate([[0]], [[2]])
    # .5² / (.25² + .25² + .5²)
    assert recorded.of([[2]])[0] == pytest.approx([math.log(2 / 3)])


def test_nothing_is_recorded_after_the_context():
    engine = model()
    with DecodeLogps(engine, temperature=1.0) as recorded:
        engine.generate([[0]], [[2]])
    engine(input_ids=torch.tensor([[1]]))
    assert recorded.of([[2]])[0] == pytest.approx([math.log(0.5)])


@pytest.mark.parametrize("claimed", [[[1, 2]], [[2, 2, 2]], [[2], [2]], []])
def test_completions_that_were_not_decoded_here_are_refused(claimed):
    engine = model()
    with DecodeLogps(engine, temperature=1.0) as recorded:
        engine.generate([[0]], [[2, 2]])
    with pytest.raises(EngineFault, match="completion_ids"):
        recorded.of(claimed)
