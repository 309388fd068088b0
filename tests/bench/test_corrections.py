"""The claims of bench/corrections.py at a small size, where its peers are installed."""

import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import cases_vs_peers  # noqa: E402
from peers import trl, verl  # noqa: E402
from peers.cases import Verl, trl_formula  # noqa: E402

import corrections as bench  # noqa: E402
from trueup.testing.cases import CASES  # noqa: E402
from trueup.testing.judge import judge  # noqa: E402


@pytest.fixture(scope="module")
def helper():
    try:
        return verl.load(bench.PEERS)
    except ModuleNotFoundError as missing:
        if os.environ.get("PEERS") == "required":
            raise
        pytest.skip(str(missing))


@pytest.mark.parametrize("seed", range(3))
def test_weights_keep_flags_and_every_figure_of_verl_are_equal_to_1e_6(helper, seed):
    batch = bench.make(64, 1024, seed=seed)
    apart = bench.difference(helper, batch)
    assert apart["keep_flags"] == 0
    assert apart["weights"] <= 1e-6
    assert apart["metrics"] <= 1e-6
    assert apart["metrics_compared"] == 44
    _, keep, metrics = bench.ours_padded(batch)
    # Not equal because nothing happened: some rows are rejected, some weights capped.
    assert 0.02 < metrics["rollout_corr/rollout_rs_seq_masked_fraction"] < 0.98
    assert metrics["rollout_corr/rollout_is_max"] == bench.CAP
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] > 0
    assert keep.any()


def test_packed_and_padded_input_give_the_same():
    batch = bench.make(16, 512)
    weight, keep, metrics = bench.ours_packed(batch)
    padded_weight, padded_keep, padded_metrics = bench.ours_padded(batch)
    chosen = batch.mask.bool()
    assert torch.equal(padded_weight[chosen], weight)
    assert torch.equal(padded_keep[chosen], keep)
    assert metrics == padded_metrics


def test_the_weights_of_trl_are_ours_where_nothing_is_rejected():
    batch = bench.make(16, 512)
    ratio, _ = trl.importance_weights(
        batch.target, batch.behaviour, batch.mask, mode="token_truncate", cap=bench.CAP
    )
    weight, keep, _ = bench.ours_padded(batch)
    torch.testing.assert_close(ratio[keep], weight[keep], rtol=1e-6, atol=0)


def test_loading_verl_leaves_no_stand_in_behind(helper):
    assert not [name for name in sys.modules if name.partition(".")[0] in {"verl", "tensordict"}]


def test_the_failures_of_peers_are_those_of_the_page(helper):
    text = cases_vs_peers.PAGE.read_text()
    light = [case for case in CASES if case.number != "C27"]  # takes a gigabyte
    rows = {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[3:-1]]
        for line in text.splitlines()
        if line.startswith("| C")
    }
    peer = Verl(bench.PEERS)
    for case in light:
        marks = [cases_vs_peers.MARKS[judge(case, f).status] for f in (peer, trl_formula)]
        assert rows[case.number] == ["pass", *marks], case.number
    assert list(rows) == [case.number for case in CASES]
