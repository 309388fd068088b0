from trueup.reports.probes import probe_table
from trueup.reports.run import read_run

LOAD = {"epoch": 0, "digest": "d", "t_end": 2.0, "tokens_recomputed": 0}


def test_a_row_tells_loads_probes_and_alarms_of_an_engine(writer):
    run = writer()
    for i, staged in enumerate((1.5, 1.25, 1.75)):
        costs = {"nbytes": 2e6, "prepare_s": 0.125, "pause_s": 0.0625}
        times = {"t_start": 1.0, "t_staged": staged}
        run.add(i, "apply", engine="engine-0", version=i, **LOAD, **times, **costs)
        scores = {"mean": 0.03 + i / 100, "p99": 0.2, "max": 0.3, "cached": 0.875}
        alarms = [["probe", "further off"]] if i else []
        floor, limit = (None, 0.1) if not i else (0.03, 0.045)
        run.add(
            i,
            "probe",
            engine="engine-0",
            version=i,
            epoch=0,
            tokens=72,
            floor=floor,
            limit=limit,
            alarms=alarms,
            **scores,
        )
    page = str(probe_table(read_run(run.close())))
    for figure in ("0.5", "0.125", "0.0625", "0.05", "0.03", "0.045", "0.3", "probe (2)"):
        assert f">{figure}<" in page, figure


def test_old_runs_without_probes_and_costs_still_have_a_row(writer):
    run = writer()
    run.add(0, "apply", engine="engine-0", version=0, **LOAD)
    assert "engine-0" in str(probe_table(read_run(run.close())))
    assert "nothing was loaded" in str(probe_table(read_run(writer("empty").close())))
