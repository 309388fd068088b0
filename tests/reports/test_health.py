from trueup.diagnostics.metrics import Metric
from trueup.records.tables import VersionRow
from trueup.reports.health import health_table, standings
from trueup.reports.html import render_report
from trueup.reports.run import read_run


def of(mean, count=1.0):
    return Metric(sum=mean * count, count=count, min=mean, max=mean)


def written(writer, steps, *overrides):
    """A run that recorded these metrics in its steps."""
    run = writer("demo", *overrides)
    run.add(0.0, "run_start", schedule={})
    for step, metrics in enumerate(steps):
        run.add(1.0 + step, "claim", group=step, version=step, step=step, episodes=[])
        run.add(1.0 + step, "train", version=step + 1, step=step, t0=0.0, t1=0.1, phases={})
        run.ledger.record_metrics(step, metrics)
        run.ledger.record_version(VersionRow(version=step + 1, digest="d", n_changed=0, nbytes=1))
    return run.close()


KL = {"kept/tokens": of(1.0, 8), "gap/log_ratio": of(-0.2, 8)}


def test_each_verdict_shows_its_last_value_and_how_often_it_failed(writer):
    path = written(
        writer,
        [
            KL | {"health/kl": of(1.0), "health/calibration": of(0.0)},
            {"kept/tokens": of(1.0, 8), "gap/log_ratio": of(-0.05, 8), "health/kl": of(0.0)},
        ],
    )
    kl, calibration = standings(read_run(path))
    assert (kl.last.name, kl.failed, kl.judged) == ("kl", 1, 2)
    assert abs(kl.last.value - 0.05) < 1e-12
    assert (calibration.last.name, calibration.failed, calibration.judged) == ("calibration", 0, 1)
    source = health_table([kl, calibration])
    assert "1 of 2" in source
    assert "|k1| &lt;= 0.1 nats" in source
    assert "behaviour and target are far apart" in source
    assert "a shift by one token" not in source  # calibration never failed


def test_the_hidden_update_is_read_from_the_versions(writer):
    path = written(writer, [KL | {"health/update_visible": of(1.0)}])
    (found,) = standings(read_run(path))
    assert (found.last.name, found.last.value, found.last.ok) == ("update_visible", 0, False)


def test_a_trend_is_judged_over_the_steps(writer):
    steps = [
        {"gap/abs_log_ratio": of(0.01 * (step + 1), 8), "health/stationary": of(float(step > 3))}
        for step in range(6)
    ]
    (found,) = standings(read_run(written(writer, steps, "train.lr=0")))
    assert (found.last.name, found.failed, found.judged) == ("stationary", 2, 6)
    assert not found.last.ok


def test_a_run_that_judged_nothing_says_so(writer):
    path = written(writer, [KL])
    assert standings(read_run(path)) == []
    assert "nothing was judged" in render_report(path)
