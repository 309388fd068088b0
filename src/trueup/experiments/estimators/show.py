"""Tables and figures of the lab, from its result alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trueup.experiments.base import Table
from trueup.experiments.estimators import published
from trueup.experiments.estimators.mismatch import KINDS
from trueup.experiments.estimators.published import printed
from trueup.reports.figure_data import Axis, Figure, Lines, Series

Result = Mapping[str, Any]

_DRAWN = ("none", "is", "tis", "mis", "ais")
_ALPHAS = {
    "none": "α = 0",
    "truncated": "α = 1",
    "ais_mean": "mean α of AIS",
    "equation_25": "Eq. 25",
    "equation_26": "Eq. 26",
}


def tables(result: Result) -> list[Table]:
    """Everything in words and digits."""
    return [
        _published(result),
        _cells(
            "Symmetric noise, by σ",
            result["one_step"],
            note="Squared bias and variance, relative to the squared gradient.",
        ),
        *(
            _cells(f"Staleness ({kind}), by KL(μ‖π)", result["stale"][kind], note=meaning)
            for kind, meaning in KINDS.items()
        ),
        _cells(
            "Episodes of T tokens, by T",
            result["chain"],
            note="Of R repeats the mean has noise in the squared bias, variance / R.",
        ),
        _exact(result["chain_exact"]),
        _oracle(result),
    ]


def figures(result: Result) -> list[Figure]:
    """The same, to look at."""
    noise, chain, exact = result["one_step"], result["chain"], result["chain_exact"]
    sigma = _axis("σ of the sampler's logits", "log")
    length = _axis("tokens per episode", "log")
    long = ("none", "is", "seq-is", "ais")
    known = _line("token weights, exact", exact, "token_bias2", "dashes")
    return [
        _figure(
            "noise-bias", "Squared bias, symmetric noise", sigma, _curves(noise, _DRAWN, "bias2")
        ),
        _figure(
            "noise-variance",
            "Variance, symmetric noise",
            sigma,
            _curves(noise, _DRAWN, "variance"),
        ),
        _figure(
            "chain-bias",
            "Squared bias by episode length",
            length,
            [*_curves(chain, long, "bias2"), known],
            "Token weights leave the sampler's prefixes in: their bias grows with T.",
        ),
        _figure(
            "chain-variance",
            "Variance by episode length",
            length,
            _curves(chain, long, "variance"),
            "Products of ratios pay for their lack of bias with T.",
        ),
        _excess(result, "noise", result["kl"], "noise"),
        _excess(result, "trained", {k: float(k) for k in result["oracle"]["trained"]}, "trained"),
    ]


def _published(result: Result) -> Table:
    rows = []
    for sigma in published.SIGMAS:
        key = str(sigma)
        kl = printed(result["kl"][key])
        rows.append([f"{sigma:g}", "KL(μ‖π)", published.KL[sigma], kl, "", "", ""])
        for name, cells in published.CELLS.items():
            cell, ours = cells[sigma], result["one_step"][name][key]
            bias2, variance = printed(ours["bias2"]), printed(ours["variance"])
            off = max(
                abs(float(bias2) - float(cell.bias2)), abs(float(variance) - float(cell.variance))
            )
            rows.append(["", name, cell.bias2, bias2, cell.variance, variance, printed(off)])
    return Table(
        title="The published table and ours, on the same random numbers",
        head=["σ", "", "bias²: source", "ours", "variance: source", "ours", "difference"],
        rows=rows,
        note=f"{published.REPEATS} repeats of {published.SAMPLES} samples.",
    )


def _cells(title: str, rows: Mapping[str, Mapping[str, Any]], *, note: str) -> Table:
    """One row per method, "bias² variance" per level of mismatch."""
    keys = list(next(iter(rows.values())))
    shown = [
        [name, *(_pair(cells[key]) if key in cells else "–" for key in keys)]
        for name, cells in rows.items()
    ]
    return Table(title=title, head=["", *keys], rows=shown, note=note)


def _exact(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    columns = {
        "pass rate π": "pass_rate_target",
        "μ": "pass_rate_behaviour",
        "bias²: none": "none_bias2",
        "token": "token_bias2",
        "prefix alone": "prefix_bias2",
        "suffix alone": "suffix_bias2",
        "cosine": "token_cosine",
        "E[(Πρ)²]": "product_second_moment",
    }
    return Table(
        title="Episodes of T tokens, exact",
        head=["T", *columns],
        rows=[[t, *(_short(row[key]) for key in columns.values())] for t, row in rows.items()],
        note="Squared bias of token weights: in all, of contexts from the sampler's prefixes "
        "alone, of outcomes from its continuations alone; cosine of their expectation to the "
        "gradient; second moment of the product of an episode's ratios.",
    )


def _gated_error(result: Result, kind: str, key: str) -> float:
    """Mean squared error of AIS, whose α differs from step batch to step batch."""
    rows = result["one_step"] if kind == "noise" else result["stale"][kind]
    cell = rows["ais"][key]
    return float(cell["bias2"] + cell["variance"])


def _oracle(result: Result) -> Table:
    rows = []
    for kind, levels in result["oracle"].items():
        for key, found in levels.items():
            alpha, error = found["alpha"], found["error"]
            rows.append(
                [
                    kind,
                    key,
                    printed(alpha["oracle"]),
                    printed(found["measured_minimum"]),
                    printed(error["oracle"]),
                    printed(error["none"]),
                    printed(error["truncated"]),
                    printed(_gated_error(result, kind, key)),
                    *(f"{alpha[a]:.3f}: {error[a]:.3f}" for a in list(_ALPHAS)[2:]),
                    _mean_std(found["estimated"]),
                    _mean_std(found["estimated_without_cross_fit"]),
                ]
            )
    return Table(
        title="The best α, and those that are chosen",
        head=["mismatch", "", "α*", "measured", "MSE(α*)", "MSE(0)", "MSE(1)", "AIS: MSE"]
        + [f"{name}: MSE" for name in list(_ALPHAS.values())[2:]]
        + ["α̂*, one batch", "not cross-fitted"],
        rows=rows,
        note="Mean squared errors relative to the squared gradient. Measured: minimum of the mean "
        "squared error of sampled step batches. α̂*: estimated from one step batch, mean ± std.",
    )


def _excess(result: Result, kind: str, kl: Mapping[str, float], words: str) -> Lines:
    levels = result["oracle"][kind]
    xs = [kl[key] for key in levels]
    best = [found["error"]["oracle"] for found in levels.values()]

    def over(name: str, errors: Iterable[float], mark: Any) -> Series:
        shares = [error / least for error, least in zip(errors, best, strict=True)]
        return {"name": name, "x": xs, "y": [*shares], "mark": mark}

    chosen = [
        over(shown, [found["error"][name] for found in levels.values()], "line")
        for name, shown in _ALPHAS.items()
    ]
    gated = over("AIS", [_gated_error(result, kind, key) for key in levels], "points")
    figure = _figure(
        f"oracle-{kind}",
        f"Mean squared error over that of the best α, {words}",
        _axis("KL(μ‖π), nats", "log"),
        [*chosen, gated],
        "1 is the oracle. The published coefficients are those of a single sample.",
    )
    return {**figure, "y": {"label": "ratio to the best", "scale": "linear", "low": 1.0}}


def _figure(
    name: str,
    title: str,
    x: Axis,
    series: list[Series],
    caption: str = "",
) -> Lines:
    return {
        "kind": "lines",
        "id": name,
        "title": title,
        "caption": caption,
        "x": x,
        "y": _axis("relative to ‖g‖²", "log"),
        "series": series,
        "rules": [],
    }


def _axis(label: str, scale: Any) -> Axis:
    return {"label": label, "scale": scale}


def _curves(
    rows: Mapping[str, Mapping[str, Any]], names: Iterable[str], figure: str
) -> list[Series]:
    return [_line(name, rows[name], figure, "line") for name in names if name in rows]


def _line(name: str, cells: Mapping[str, Mapping[str, Any]], figure: str, mark: Any) -> Series:
    return {
        "name": name,
        "x": [float(key) for key in cells],
        "y": [cell[figure] for cell in cells.values()],
        "mark": mark,
    }


def _pair(cell: Mapping[str, float]) -> str:
    return f"{_short(cell['bias2'])} {_short(cell['variance'])}"


def _short(value: float) -> str:
    """Three decimals, or three digits where that is too long."""
    return printed(value) if abs(value) < 1e4 else f"{value:.3g}"


def _mean_std(found: Mapping[str, float]) -> str:
    return f"{found['mean']:.2f} ± {found['std']:.2f}"
