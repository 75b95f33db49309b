"""``lc.audit``: train canaries by a plan, look at what is released, and say whether it can be what the plan claims."""

from __future__ import annotations

import json
import math
import textwrap
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lambdacgd.accounting.certificate import progress
from lambdacgd.auditing.bounds import LowerBound, ideal_scores, lower_bound
from lambdacgd.auditing.canaries import Train, plain_loop, record
from lambdacgd.auditing.conformance import Check, Measured, checks
from lambdacgd.errors import InvalidInput, integer, number
from lambdacgd.planning import Plan
from lambdacgd.training.step import check_is_plan
from lambdacgd.version import __version__

FORMAT = "lambdacgd-audit-1"
FALSE_ALARM = 1e-4
"""α: the probability that an audit of a correct run fails."""
LARGEST = 15_000_000
"""At most this many numbers are released by a run, steps times canaries, unless the caller asks for more canaries."""
MOST_STEPS = 5_000
"""The longest plan: matrices have a row and a column per step, and several of them are in memory at once."""


@dataclass(frozen=True)
class Report:
    """What an audit measured.

    Attributes:
        plan: The plan that was audited.
        checks: The tests, in order. One fails if its p-value is below ``level``.
        level: α divided by the number of tests.
        bound: The lower bound on ε. None if a run did not release what can be scored.
        ideal: The lower bound that an ideal mechanism would have given on average, with as many canaries.
        runs: How often canaries were trained.
        canaries: How many canaries each run had.
        seconds: How long the audit took.
    """

    plan: Plan
    checks: list[Check]
    level: float
    bound: LowerBound | None
    ideal: float
    runs: int
    canaries: int
    seconds: float

    @property
    def failed(self) -> list[Check]:
        """The tests that failed."""
        return [check for check in self.checks if not check.p_value >= self.level]

    @property
    def passed(self) -> bool:
        """Whether nothing was caught. That is no proof: an audit can only show that a claim is false."""
        return not self.failed

    @property
    def verdict(self) -> str:
        """One sentence."""
        if not self.passed:
            return f"CAUGHT: what was released is not what the plan says ({', '.join(c.name for c in self.failed)})"
        return f"nothing was caught: {len(self.checks)} tests agree with the plan (false alarms: {FALSE_ALARM:g})"

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it. It holds no key, no bin and no score of an example."""
        return {
            "format": FORMAT,
            "library": f"lambdacgd {__version__}",
            "verdict": self.verdict,
            "passed": self.passed,
            "plan": str(self.plan),
            "plan_digest": self.plan.digest,
            "claimed": {"epsilon": self.plan.epsilon, "delta": self.plan.delta, "sigma": self.plan.sigma},
            "lower_bound": None if self.bound is None else asdict(self.bound),
            "ideal_lower_bound": self.ideal,
            "false_alarm_rate": FALSE_ALARM,
            "level_of_a_test": self.level,
            "tests": [check._asdict() | {"passed": check not in self.failed} for check in self.checks],
            "runs": self.runs,
            "canaries_of_a_run": self.canaries,
            "seconds": round(self.seconds, 1),
        }

    def save(self, path: str | Path) -> None:
        """Write the report as JSON; beside a release's card it shows what was tried.

        Args:
            path: The file.
        """
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    def __str__(self) -> str:
        lines = [f"audit of {self.plan}", f"  {self.runs} runs of {self.canaries} canaries, {self.seconds:.0f} s"]
        if self.bound is not None:
            lines.append(
                f"  ε ≥ {self.bound.epsilon:.3f} at {self.bound.confidence:.0%} confidence; claimed "
                f"{self.plan.epsilon:g}; an ideal run with as many canaries shows {self.ideal:.3f}"
            )
        for check in self.checks:
            mark = "ok    " if check not in self.failed else "CAUGHT"
            lines.append(f"  {mark} {check.name}: {check.measured} (p = {check.p_value:.2g})")
        told = "\n".join([*lines, f"  {self.verdict}"]).replace(" = ", "\xa0=\xa0")  # lines break elsewhere
        wrapper = textwrap.TextWrapper(80, subsequent_indent=" " * 9, break_on_hyphens=False)
        return "\n".join(map(wrapper.fill, told.splitlines())).replace("\xa0", " ")


def audit(
    plan: Plan,
    train: Train | None = None,
    *,
    runs: int | None = None,
    canaries: int | None = None,
    max_grad_norm: float = 1.0,
    confidence: float = 0.95,
    seed: int | None = None,
) -> Report:
    """Train canaries by the plan, with the real ``privatize``, and test what is released against what the plan says.

    Args:
        plan: From ``lc.plan``.
        train: Your own loop, called once a run as ``train(model, optimizer, dataset, plan, max_grad_norm)``. It must
            call ``lc.privatize`` with these five, and whatever else you use, and train through all steps;
            ``model(batch)`` returns one loss per example. By default the plain loop.
        runs: How often; by default from 2 to 10, so that there are 20 000 canaries if that does not take long.
        canaries: How many canaries in a run; by default as many as the data set and 15 million released numbers allow.
        max_grad_norm: ζ.
        confidence: Of the lower bound on ε that is shown.
        seed: Chooses canaries and coins. Noise and bins come from the runs' own keys, so audits differ all the same.

    Returns:
        The report. ``report.passed`` says whether nothing was caught.

    Raises:
        InvalidInput: The plan claims nothing that can be audited, or a number cannot be used.

    Guarantee
    ---------
    If runs do what the plan says and the plan's claim is true, the audit fails with probability at most 10⁻⁴ (see
    docs/audit-laws.md for each test's law). That it passes proves nothing: differences too small for the number of
    canaries stay unseen.
    """
    number("max_grad_norm", max_grad_norm, above=0)
    runs, size = _sizes(plan, runs, canaries)
    begun, rng = time.monotonic(), np.random.default_rng(seed)
    measured: list[Measured] = []
    with progress("training canaries by the plan", runs) as tick:
        for _ in range(runs):
            recording = record(plan, train or plain_loop, canaries=size, max_grad_norm=max_grad_norm, rng=rng)
            if (releases := len(recording.released)) != plan.steps:
                wrong = Check("steps", 0.0, f"{releases} releases, the plan has {plan.steps}")
                return Report(plan, [wrong], FALSE_ALARM, None, 0.0, runs, size, time.monotonic() - begun)
            measured.append(Measured(plan, recording, max_grad_norm))
            tick(1)
    scores, present = (np.concatenate([getattr(run, name) for run in measured]) for name in ("scores", "present"))
    included, excluded = scores[present], scores[~present]
    answers = [Check("steps", 1.0, f"{plan.steps} releases in each run"), *checks(plan, measured)]
    level = FALSE_ALARM / (len(answers) + 1)
    sure = lower_bound(included, excluded, delta=plan.delta, confidence=1 - level).epsilon
    answers.append(Check("ε", float(sure <= plan.epsilon), f"ε ≥ {sure:.3f} but for {level:.1g}"))
    bound = lower_bound(included, excluded, delta=plan.delta, confidence=confidence)
    ideal = ideal_scores(plan, min(runs * size, 10 * LARGEST // plan.steps), rng)
    expected = lower_bound(*ideal, delta=plan.delta, confidence=confidence).epsilon
    return Report(plan, answers, level, bound, expected, runs, size, time.monotonic() - begun)


def _sizes(plan: Plan, runs: int | None, canaries: int | None) -> tuple[int, int]:
    """How often canaries are trained, and how many of them; refuses a plan that cannot be audited."""
    check_is_plan(plan)
    plan.check()
    if not plan.sigma or not math.isfinite(plan.epsilon):
        raise InvalidInput("plan", "The plan has no noise, so it claims nothing that could be audited.")
    if plan.steps > MOST_STEPS:
        told = f"The plan has {plan.steps} steps, and an audit takes at most {MOST_STEPS}: audit a shorter one."
        raise InvalidInput("plan", told)
    most = plan.examples - 1
    if most < 32:
        raise InvalidInput("plan", f"The plan has {plan.examples} examples, and an audit needs at least 33.")
    size = min(most, max(64, LARGEST // plan.steps))
    if canaries is not None:
        size = integer("canaries", canaries, minimum=32, maximum=most, why=" (the examples but the first)")
    if runs is None:
        runs = 2 if size * plan.steps > LARGEST // 2 else min(10, max(2, math.ceil(20_000 / size)))
    return integer("runs", runs), size
