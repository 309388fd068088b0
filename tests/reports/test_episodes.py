import json

from trueup.records.tokens import write_step
from trueup.reports.episodes import MAX_TOKENS, render, samples, vocabulary


def test_picked_episodes_show_the_extremes_once_each(writer, row):
    run = writer()
    rows = [
        row("plain", reward=0.5),
        row("wide", reward=0.5, engine=0.4),
        row("best", reward=1.0),
        row("worst", reward=0.0),
        row("dropped", reward=9.0, trained=False),
    ]
    write_step(run.directory, 0, rows)
    found = {sample.episode: sample.why for sample in samples(run.close())}
    assert found == {
        "wide": "Widest gap",
        "plain": "Most versions",  # all have one; the first
        "best": "Highest reward",
        "worst": "Lowest reward",
    }


def test_every_token_tells_its_version_and_gap(writer, row):
    run = writer()
    write_step(run.directory, 0, [row("a", version=3, step_version=3, engine=0.25, weight=1.28)])
    (sample,) = samples(run.close())
    assert [token.version for token in sample.tokens] == [None] * 3 + [3] * 4
    assert [token.text for token in sample.tokens] == [str(i) for i in range(7)]
    assert "version 3 on engine-0 (float32)" in sample.tokens[3].detail
    assert "log μ -1.250 · log π -1.000 · gap +0.250 · weight 1.28" in sample.tokens[3].detail
    assert "gap-3" in render(sample)  # at least .2 nats, less than .5


def test_a_long_episode_is_cut_and_says_so(writer, row):
    run = writer()
    write_step(run.directory, 0, [row("a", world=MAX_TOKENS, actions=5)])
    (sample,) = samples(run.close())
    assert len(sample.tokens) == MAX_TOKENS
    assert "… 5 more tokens" in render(sample)


def test_words_come_from_the_newest_checkpoint_that_can_be_read(writer):
    run = writer()
    for step, text in (
        (1, json.dumps({"model": {"vocab": {"old": 0}}})),
        (
            2,
            json.dumps(
                {"model": {"vocab": {"new": 0}}, "added_tokens": [{"id": 1, "content": "<end>"}]}
            ),
        ),
        (3, "{torn"),
    ):
        run.directory.checkpoint(step).mkdir()
        (run.directory.checkpoint(step) / "tokenizer.json").write_text(text)
    assert vocabulary(run.close()) == {0: "new", 1: "<end>"}


def test_a_vocabulary_may_be_a_list_of_scored_pieces(writer):
    run = writer()
    run.directory.checkpoint(1).mkdir()
    listed = json.dumps({"model": {"vocab": [["a", -1.0], ["b", -2.0]]}})
    (run.directory.checkpoint(1) / "tokenizer.json").write_text(listed)
    assert vocabulary(run.close()) == {0: "a", 1: "b"}


def test_a_gap_counts_whatever_its_sign(writer, row):
    run = writer()
    write_step(run.directory, 0, [row("a", engine=-0.25)])
    (sample,) = samples(run.close())
    assert "gap -0.250" in sample.tokens[3].detail
    assert "gap-3" in render(sample)
