from __future__ import annotations

import itertools
from collections import Counter

from trueup.environments.bugfix_source import (
    HELDOUT_NAMES,
    NAMES,
    OPERATORS,
    TRAIN_NAMES,
    Bug,
    bugs,
    vocabulary,
)

TRAIN = [bug for task, bug in bugs().items() if task.split == "train"]
HELDOUT = [bug for task, bug in bugs().items() if task.split == "heldout"]


def score(tasks: list[Bug], policy: dict[str, str]) -> float:
    """Mean reward of a policy from issue to operator, as passes per task."""
    return sum(policy[bug.issue] == bug.correct for bug in tasks) / len(tasks)


def test_every_name_occurs_once_with_every_correct_and_every_buggy_operator() -> None:
    everything = TRAIN + HELDOUT
    assert (len(TRAIN), len(HELDOUT)) == (20, 10)
    square = set(itertools.product(NAMES, OPERATORS))
    assert {(bug.name, bug.correct) for bug in everything} == square
    assert {(bug.name, bug.buggy) for bug in everything} == square
    assert all(bug.buggy != bug.correct for bug in everything)
    assert {bug.name for bug in TRAIN} == set(TRAIN_NAMES)
    assert {bug.name for bug in HELDOUT} == set(HELDOUT_NAMES)


def test_every_ordered_pair_of_operators_is_trained_once() -> None:
    pairs = Counter((bug.correct, bug.buggy) for bug in TRAIN)
    assert pairs == Counter(itertools.permutations(OPERATORS, 2))


def test_every_policy_that_sees_only_the_issue_scores_exactly_a_fifth() -> None:
    for tasks, names in ((TRAIN, TRAIN_NAMES), (HELDOUT, HELDOUT_NAMES)):
        issues = [f"fix {name}" for name in names]
        scores = {
            score(tasks, dict(zip(issues, choice, strict=True)))
            for choice in itertools.product(OPERATORS, repeat=len(names))
        }
        assert scores == {0.2}


def test_policy_that_memorised_all_training_tasks_scores_exactly_a_fifth_blind() -> None:
    answers = {
        bug.issue: Counter(b.correct for b in TRAIN if b.issue == bug.issue) for bug in TRAIN
    }
    overall = Counter(bug.correct for bug in TRAIN)
    policy = {
        bug.issue: answers.get(bug.issue, overall).most_common(1)[0][0] for bug in TRAIN + HELDOUT
    }
    assert score(TRAIN, policy) == 0.2
    assert score(HELDOUT, policy) == 0.2


def test_the_bug_alone_says_no_more_than_that_it_is_wrong() -> None:
    for buggy in OPERATORS:
        correct = Counter(bug.correct for bug in TRAIN if bug.buggy == buggy)
        assert sorted(correct.values()) == [1, 1, 1, 1]


def test_no_two_operators_agree_on_any_input() -> None:
    outcomes = {
        bug.correct: [case.expected for case in bug.cases] for bug in TRAIN if bug.name == "clamp"
    }
    assert outcomes == {
        "+": [9, 13, 22, -5],
        "-": [5, 5, 12, -11],
        "*": [14, 36, 85, -24],
        "//": [3, 2, 3, -3],
        "%": [1, 1, 2, 1],
    }
    for values in zip(*outcomes.values(), strict=True):
        assert len(set(values)) == 5


def test_every_word_template_and_pair_of_arguments_is_trained() -> None:
    def parts(tasks: list[Bug]) -> set[tuple[str, str | bool]]:
        words = {(bug.correct, word) for bug in tasks for word in bug.specification.split()}
        templates = {(bug.correct, bug.specification.startswith("# of")) for bug in tasks}
        return words | templates | {bug.arguments for bug in tasks}

    assert parts(HELDOUT) <= parts(TRAIN)
    assert {part for part in parts(TRAIN) if isinstance(part[1], bool)} == set(
        itertools.product(OPERATORS, (False, True))
    )


def test_words_of_an_operator_are_its_own() -> None:
    shared = set.intersection(*({*bug.specification.split()} for bug in TRAIN))
    arguments = {name for bug in TRAIN for name in bug.arguments}
    owner: dict[str, set[str]] = {}
    for bug in TRAIN:
        for word in set(bug.specification.split()) - shared - arguments:
            owner.setdefault(word, set()).add(bug.correct)
    assert all(len(operators) == 1 for operators in owner.values())
    assert Counter(operator for (operator,) in owner.values()) == dict.fromkeys(OPERATORS, 3)


def test_first_task_reads_as_it_should() -> None:
    bug = TRAIN[0]
    assert bug.issue == "fix clamp"
    assert bug.source("-") == ("# return the sum of x and y\ndef clamp ( x , y ) : return x - y\n")


def test_every_source_is_python_that_computes_its_operator() -> None:
    for bug in TRAIN + HELDOUT:
        for operator in OPERATORS:
            scope: dict[str, object] = {}
            exec(compile(bug.source(operator), "file", "exec"), scope)
            answers = [scope[bug.name](*case.arguments) for case in bug.cases]  # type: ignore[operator]
            expected = [case.expected for case in bug.cases]
            assert (answers == expected) == (operator == bug.correct)


def test_vocabulary_is_small_sorted_and_free_of_special_tokens() -> None:
    words = vocabulary()
    assert list(words) == sorted(set(words))
    assert len(words) == 48
    assert not any(word.startswith("<") for word in words)
