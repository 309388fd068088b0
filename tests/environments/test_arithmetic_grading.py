import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueup.environments.arithmetic_grading import grade

ANSWERS = st.integers(0, 10_000)


@pytest.mark.parametrize(
    "text",
    [
        "7",
        " 7 ",
        "7.",
        "3 + 4 = 7",
        "3 + 4 = 7.\n",
        "The answer is 7.",
        "8, no: 7",
        "= 07",
        "4+3=7",
    ],
)
def test_the_last_number_at_the_end_passes(text: str) -> None:
    assert grade(text, 7).reward == 1.0


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("7 is the answer", 0.9),
        ("7!", 0.9),
        ("3 + 4 = 8", 0.1),
        ("7 + 8", 0.1),
        ("-7", 0.1),
        ("77", 0.1),
        ("7.5", 0.0),
        ("5.7", 0.0),
        ("7,000", 0.0),
        ("1,7", 0.0),
        ("7" * 13, 0.0),
        ("seven", 0.0),
        ("", 0.0),
        ("٧", 0.0),
        ("⁷", 0.0),
        ("__import__('os').abort()", 0.0),
    ],
)
def test_rewards_of_other_texts(text: str, reward: float) -> None:
    assert grade(text, 7).reward == pytest.approx(reward)


@given(text=st.text(), answer=ANSWERS)
def test_any_text_has_a_reward_and_only_the_right_one_passes(text: str, answer: int) -> None:
    verdict = grade(text, answer)
    assert 0.0 <= verdict.reward <= 1.0
    assert (verdict.reward == 1.0) == (verdict.right and verdict.in_format)


@given(before=st.text(), answer=ANSWERS, stop=st.sampled_from(["", ".", "\n", " .\n"]))
def test_the_right_answer_passes_whatever_came_before_it(
    before: str, answer: int, stop: str
) -> None:
    assert grade(f"{before} {answer}{stop}", answer).reward == 1.0


@given(before=st.text(), answer=ANSWERS, other=st.integers(-10_000, 10_000))
def test_a_wrong_answer_never_passes_whatever_came_before_it(
    before: str, answer: int, other: int
) -> None:
    verdict = grade(f"{before} {other}", answer)
    assert verdict.in_format
    assert verdict.right == (other == answer)


def test_a_text_as_long_as_a_model_can_write_is_judged_at_once() -> None:
    assert grade("1," * 200_000 + "x", 1).reward == 0.0
    assert grade("9" * 400_000, 1).reward == 0.0
