from collections import Counter

import pytest

from trueup.environments.arithmetic_problems import EXAMPLES, HELDOUT, LEVELS, Problem, problems
from trueup.errors import ConfigError


def of_split(level: int, split: str) -> list[Problem]:
    return [problem for task, problem in problems(level).items() if task.split == split]


@pytest.mark.parametrize("level", LEVELS)
def test_no_operands_of_a_heldout_problem_are_seen_in_training(level: int) -> None:
    train, heldout = of_split(level, "train"), of_split(level, "heldout")
    shown = {example.pair for example in EXAMPLES}
    seen = {problem.pair for problem in train} | shown
    assert not seen & {problem.pair for problem in heldout}
    assert not shown & {problem.pair for problem in train}


@pytest.mark.parametrize("level", LEVELS)
def test_heldout_problems_are_many_and_independent(level: int) -> None:
    heldout = of_split(level, "heldout")
    assert len(heldout) == len({problem.pair for problem in heldout}) == HELDOUT
    signs = Counter(problem.sign for problem in heldout)
    assert set(signs) == set(LEVELS[level].signs)
    assert max(signs.values()) - min(signs.values()) <= 1


@pytest.mark.parametrize("level", LEVELS)
def test_every_problem_exists_once_and_has_operands_of_its_level(level: int) -> None:
    found = problems(level)
    assert len(set(found.values())) == len(found)
    assert len({task.id for task in found}) == len(found)
    for problem in found.values():
        assert 1 <= problem.pair[0] <= problem.pair[1] <= LEVELS[level].largest
        assert problem.answer >= 0
        assert problem.sign in LEVELS[level].signs


def test_both_splits_together_are_all_problems() -> None:
    """Level 1: 30 · 30 ordered sums, of which training lacks one order of each held-out pair."""
    train, heldout = of_split(1, "train"), of_split(1, "heldout")
    examples = sum(2 - (a == b) for a, b in (example.pair for example in EXAMPLES))
    unasked = sum(problem.left != problem.right for problem in heldout)
    assert len(train) + len(heldout) == 30 * 30 - examples - unasked


def test_answers_are_those_of_arithmetic() -> None:
    assert Problem(left=3, sign="+", right=4).answer == 7
    assert Problem(left=9, sign="-", right=4).answer == 5
    assert Problem(left=6, sign="*", right=7).answer == 42


def test_a_prompt_shows_the_form_of_an_answer() -> None:
    assert Problem(left=12, sign="-", right=5).prompt == (
        "Q: What is 9 + 8?\nA: 9 + 8 = 17\nQ: What is 12 - 5?\nA:"
    )


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"environment\.level must be 1 to 4"):
        problems(9)
