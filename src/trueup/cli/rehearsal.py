"""`trueup train --dry-run`: everything that can be refused, and what would happen."""

from __future__ import annotations

from typing import Any

from trueup.cli.output import emit, show
from trueup.cli.plan import Plan
from trueup.cli.runs import shown
from trueup.cli.settings import changed, plain
from trueup.config import TINY_AGENT, Config, cache_dir


def rehearse(plan: Plan, *, as_json: bool) -> None:
    """Check a plan and say what it would do.

    Raises:
        UsageError: The run would be refused.
    """
    from trueup.training import preflight

    first = 0
    if plan.resumes:
        first = preflight.check_resume(plan.run, plan.config)[1].start.step
    else:
        preflight.check(plan.config)
    different = changed(plan.config)
    if as_json:
        emit(
            {
                "run": plan.run.name,
                "directory": str(shown(plan.run.path)),
                "changed": {name: value for name, (value, _) in different.items()},
                "first_step": first,
                "steps": plan.config.train.steps,
                "episodes_per_step": plan.config.episodes_per_step,
                "staleness_bound": plan.config.staleness_bound,
                "processes": processes(plan.config),
                "builds_base": plan.builds_base,
            }
        )
        return
    show(f"{plan.source} would {'go on' if plan.resumes else 'run'} in {plan.directory}")
    for name, value in _facts(plan, first):
        show(f"  {name:14}{value}")
    show("  defaults      all kept" if not different else "  not default:")
    for name, (value, default) in different.items():
        show(f"    {name} = {plain(value)}  (default {plain(default)})")
    show("Nothing was started and nothing was written.")


def processes(config: Config) -> list[str]:
    """Names of the processes of a run."""
    engines = [f"engine-{index}" for index in range(config.engine.count)]
    rollout = [] if config.train.deterministic else ["rollout"]
    return ["controller", "learner", *engines, *rollout]


def _facts(plan: Plan, first: int) -> list[tuple[str, Any]]:
    from trueup.models.catalog import MODELS

    config = plan.config
    policy = config.model.path
    if plan.resumes:
        policy = f"step {first} of this run"
    elif policy == TINY_AGENT or policy in MODELS:
        built = ", built first (about 30 s)" if plan.builds_base else ""
        policy = f"{policy} of {cache_dir()}{built}"
    return [
        ("size", plan.size + (f", from step {first}" if first else "")),
        ("policy", policy),
        (
            "token lag",
            f"at most {config.staleness_bound} versions; beyond: {config.schedule.consume}",
        ),
        ("correction", _correction(config)),
        ("evaluation", _evaluation(config)),
        ("processes", ", ".join(processes(config))),
        ("checkpoints", f"every {config.checkpoint.every} steps, {config.checkpoint.keep} kept"),
    ]


def _correction(config: Config) -> str:
    chosen = config.correction
    filters = f" after {', '.join(chosen.filters)}" if chosen.filters else ""
    part = "" if chosen.on == "total" else f", of {chosen.on} alone"
    return f"{chosen.preset}{filters}{part}{', normalised' if chosen.normalize else ''}"


def _evaluation(config: Config) -> str:
    if not config.eval.samples:
        return "none"
    between = f", every {config.eval.every} steps" if config.eval.every else ""
    return f"before and after{between}, {config.eval.samples} episodes per held-out task"
