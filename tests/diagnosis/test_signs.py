from support.blind import examined
from trueup.diagnosis.signs import draw_signs, signs


def test_a_sound_engine_shows_none():
    case, _ = examined(seed=7)
    assert signs(case) == []
    # Six standard errors: a false alarm once in 10⁹.
    assert draw_signs(case, case.usable) == []


def test_lost_log_probs_are_counted_and_leave_the_rest():
    case, found = examined("dropped_logprobs", seed=8)
    (sign,) = signs(case)
    assert sign.cause == "dropped_logprobs"
    assert 0.02 < sign.tokens.double().mean() < 0.3
    assert found.tokens == len(case.usable) - int(sign.tokens.sum())
    assert found.left < 1e-5


def test_forged_ends_are_told_apart_from_sampled_ones():
    case, _ = examined("appended_eos", seed=9)
    (sign,) = signs(case)
    assert (case.rollouts.said[sign.tokens] == 0).all()
    assert (case.rollouts.token[sign.tokens] == 3).all()
    sampled = (case.rollouts.token == 3) & ~sign.tokens
    assert (case.rollouts.said[sampled] < 0).all()
