from trueup.reports.charts import draw, has_data
from trueup.reports.mismatch import mismatch_figures


def test_a_pair_that_agrees_exactly_is_left_out_and_others_rise_to_one():
    left, right = mismatch_figures(
        {"apart": [0.0, 0.1, 0.2, 0.4], "same": [0.0, 0.0]}, [(0.0, 0.5, 0.3), (0.5, 1.0, 0.1)]
    )
    (series,) = left["series"]
    assert series["name"] == "apart"
    # The token without a gap is below every gap, and has no place on a logarithmic axis.
    assert (series["x"], series["y"]) == ([0.1, 0.2, 0.4], [0.5, 0.75, 1.0])
    assert (right["series"][0]["x"], right["series"][0]["y"]) == ([0.25, 0.75], [0.3, 0.1])
    assert all(has_data(figure) and "<svg" in draw(figure) for figure in (left, right))
