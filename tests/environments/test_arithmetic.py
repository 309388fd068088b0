import pytest

from trueup.environments.arithmetic import ArithmeticEnvironment
from trueup.errors import ConfigError
from trueup.types import Task

ENVIRONMENT = ArithmeticEnvironment(level=2)
TASK = ENVIRONMENT.tasks("train")[0]
ANSWER = ENVIRONMENT.problem(TASK).answer


@pytest.mark.parametrize(
    ("said", "reward", "right", "in_format"),
    [
        (f"It is {ANSWER}.", 1.0, 1, 1),
        (f"{ANSWER} it is", 0.9, 1, 0),
        (f"{ANSWER + 1}", 0.1, 0, 1),
        ("no idea", 0.0, 0, 0),
    ],
)
def test_one_answer_ends_the_episode_with_its_reward(
    said: str, reward: float, right: int, in_format: int
) -> None:
    env = ENVIRONMENT.make(TASK, seed=0)
    assert env.start() == ENVIRONMENT.problem(TASK).prompt
    step = env.step(said)
    assert (step.done, step.observation, step.tool) == (True, "", "answer")
    assert step.reward == pytest.approx(reward)
    assert step.counters == {"right": right, "in_format": in_format}


def test_an_answer_that_was_cut_earns_nothing() -> None:
    env = ENVIRONMENT.make(TASK, seed=0)
    env.start()
    assert env.finish() == 0.0


def test_a_task_of_another_environment_is_refused() -> None:
    with pytest.raises(ConfigError, match="one of this environment's"):
        ENVIRONMENT.make(Task(id="x", split="train"), seed=0)


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(ConfigError, match="train or heldout"):
        ENVIRONMENT.tasks("test")
