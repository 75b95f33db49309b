"""jax_privacy and Opake (``opake`` on PyPI) on the accountants' own question, beside ours, in one run.

    python -m benchmarks.peers [--cap 120] [--memory-gb 12] [--out results/accountants-cpu.json]

The question: the smallest σ for which a mechanism under Balls-in-Bins with fixed bins is (ε, δ)-DP. Each peer works it
out by its documented routine in a process of its own, one at a time, under a cap on CPU seconds (of all threads,
imports not counted) and one on memory. What it had done when a cap struck is kept: a peer that did not finish says how
far it came. A peer that is not installed, or does not import, says so. Both are given a favour: they search σ in a
range around our answer.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from reproduce.framework import ROOT, measured_on

NAMES = {"jax_privacy": "jax-privacy", "opake": "opake"}
# What jax_privacy's sweep tries, from safe to bold, in units of our σ. The last is there to compare δ, not to pass.
SWEEP = (1.3, 1.2, 1.1, 1.0)
# jax_privacy verifies a smaller δ than it reports; the nearer the two, the more samples it takes (.5: 1.1e7 at 1e-5).
BASE_SHARE = 0.5


@dataclass(frozen=True)
class Question:
    """σ(ε, δ) of λCGD (``lam``) or BISR (``bands``) over k epochs of b bins; ``column`` is C's first one."""

    b: int
    k: int
    epsilon: float
    delta: float
    lam: float | None = None
    bands: int | None = None

    @property
    def name(self) -> str:
        what = f"λCGD {self.lam:g}" if self.lam is not None else f"BISR {self.bands}"
        return f"{what}, b = {self.b}, k = {self.k}, ε = {self.epsilon:g}, δ = {self.delta:g}"

    def column(self) -> np.ndarray:
        """First column of C, without the entries that float64 does not feel (λ^390 ≈ 1e-18 at λ = .9)."""
        from lambdacgd.mechanisms import BISR, LambdaCGD

        mechanism = LambdaCGD(self.lam) if self.lam is not None else BISR(self.bands or 0)
        column = np.asarray(mechanism.strategy(self.b * self.k))
        return column[: int(np.flatnonzero(column > 1e-17)[-1]) + 1]


PAPER = (Question(390, 10, 8.0, 1e-5, lam=0.9), Question(390, 10, 8.0, 1e-5, bands=4))
SMALL = (Question(20, 5, 2.0, 1e-2, lam=0.9), Question(20, 5, 2.0, 1e-2, bands=4))


def ask(peer: str, question: Question, sigma: float, *, cap: float = 120.0, memory_gb: float = 12.0) -> dict[str, Any]:
    """A peer's answer, and its time or why there is none; ``sigma`` is ours, to search around."""
    row: dict[str, Any] = {"peer": peer, "version": version(peer)}
    if row["version"] is None:
        return row | {"outcome": "not installed"}
    task = {"question": asdict(question), "peer": peer, "sigma": sigma, "memory_gb": memory_gb, "cap": cap}
    cpu = _children_cpu()
    with tempfile.TemporaryFile("a+") as said, tempfile.TemporaryFile("a+") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peers", "--child", json.dumps(task)],
            cwd=ROOT,
            stdout=said,
            stderr=errors,
            text=True,
        )
        try:
            child.wait()
        finally:
            child.kill()
            child.wait()
        if child.returncode == -signal.SIGXCPU:
            row["outcome"] = f"did not finish in {cap:g} CPU s"
        facts = _lines(said)
        if "begun_cpu" in facts:
            row["cpu_seconds"] = _children_cpu() - cpu - facts.pop("begun_cpu")
        errors.seek(0)
        complaint = errors.read().strip().splitlines()
    row |= {key: value for key, value in facts.items() if key != "outcome"}
    if "outcome" not in row:
        row["outcome"] = facts.get("outcome") or f"died: {complaint[-1] if complaint else child.returncode}"
    if per_sample := row.get("cpu_seconds_a_sample"):
        row["projected_cpu_seconds"] = per_sample * row["samples_needed"]
    if row.get("sigma"):
        row["sigma_over_ours"] = row["sigma"] / sigma
    return row


def _children_cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def version(peer: str) -> str | None:
    try:
        return importlib.metadata.version(NAMES[peer]) if importlib.util.find_spec(peer) else None
    except importlib.metadata.PackageNotFoundError:
        return None


def _lines(said: Any) -> dict[str, Any]:
    """The child's facts so far, later ones over earlier ones. A line that is still being written waits."""
    said.seek(0)
    facts: dict[str, Any] = {}
    for line in said.read().split("\n")[:-1]:
        if line.startswith("{"):
            facts |= json.loads(line)
    return facts


# ---- in the child ----


Caps = tuple[float, float]  # CPU seconds and GB of memory beyond what the imports took


def _say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def _begin(caps: Caps) -> float:
    """Caps CPU seconds and memory at what the imports took and these more; starts the clock."""
    cap, memory_gb = caps
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + int(memory_gb * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    began = time.process_time()
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(began + cap), resource.RLIM_INFINITY))
    _say(begun_cpu=began)
    return began


def _jax_privacy(question: Question, sigma: float, caps: Caps) -> dict[str, Any]:
    """Its Monte Carlo verification of a sweep (``perform_calibration_from_samples``), in both directions."""
    from jax_privacy import batch_selection
    from jax_privacy.experimental.monte_carlo import delta_calculation, sample_generation

    strategy = batch_selection.BallsInBinsSampling(iterations=question.b * question.k, cycle_length=question.b)
    column, rng, batch = question.column(), np.random.default_rng(1), 100
    started = _begin(caps)
    count = delta_calculation.minimum_samples_to_calibrate(BASE_SHARE * question.delta, question.delta)
    _say(routine="monte_carlo.perform_calibration_from_samples", samples_a_list=count)
    _say(samples_needed=count * 2 * len(SWEEP), sweep=[factor * sigma for factor in SWEEP])
    done, losses = 0, {True: [], False: []}  # type: ignore[var-annotated]
    for factor in SWEEP:
        for positive in (True, False):
            drawn = []
            for first in range(0, count, batch):
                drawn.append(
                    sample_generation.get_privacy_loss_sample(
                        strategy, factor * sigma, column, rng, positive, min(batch, count - first)
                    )[0]
                )
                done += len(drawn[-1])
                _say(samples=done, cpu_seconds_a_sample=(time.process_time() - started) / done)
            losses[positive].append(np.concatenate(drawn))
    passed, index = delta_calculation.perform_calibration_from_samples(
        question.epsilon, question.delta, positive_samples=losses[True], negative_samples=losses[False]
    )
    summand = -np.expm1(np.minimum(question.epsilon - losses[True][-1], 0.0))
    estimate = delta_calculation.delta_from_epsilon_and_samples(question.epsilon, losses[True][-1])
    return {
        "sigma": SWEEP[int(index)] * sigma if passed else None,
        "delta_at_our_sigma": float(estimate),
        "delta_standard_error": float(summand.std() / math.sqrt(count)),
    }


def _opake(question: Question, sigma: float, caps: Caps) -> dict[str, Any]:
    """Its ``calibrate`` over ``balls_in_bins(mf_gaussian(σ, strategy))``, at its default confidence."""
    import opake.accounting as accounting
    import opake.dpftrl.accounting as dpftrl
    from opake.dpftrl.noise import bisr_strategy, lambda_cgd_strategy

    strategy = (
        lambda_cgd_strategy(lambda_=question.lam, normalized=False)
        if question.lam is not None
        else bisr_strategy(bandwidth=question.bands, normalized=False)
    )
    probes = 0

    def process(noise_multiplier: float) -> Any:
        nonlocal probes
        _say(probes_begun=(probes := probes + 1), probe_began_after=time.process_time() - started)
        return dpftrl.balls_in_bins(
            dpftrl.mf_gaussian(noise_multiplier, strategy), num_bins=question.b, n_steps=question.b * question.k
        )

    default = accounting.get_discretization()
    resolution = min(default.mc_resolution, question.delta / 2)
    per_probe = accounting.get_discretization(
        mc_resolution=resolution, mc_failure_probability=default.mc_failure_probability / 102
    ).resolved_num_mc_samples
    # one projected draw of b numbers a sample and direction, in float64: what its cache of draws would hold
    _say(routine="accounting.calibrate", samples_a_probe_and_direction=per_probe, tolerance=TOLERANCE)
    _say(draws_gb=2 * per_probe * question.b * 8 / 1e9)
    started = _begin(caps)
    found = accounting.calibrate(
        accounting.epsilon_budget(question.epsilon, delta=question.delta),
        process,
        param_min=0.8 * sigma,
        param_max=1.5 * sigma,
        tolerance=TOLERANCE,
    )
    facts = {"probes": probes, "sigma": found.param}
    # one evaluation more, in the CPU seconds
    return facts | {"epsilon_at_our_sigma": process(sigma).epsilon_at(question.delta)}


# Of ε, relative. Opake's default is 1e-6: a looser one is another favour, as it takes fewer bisections.
TOLERANCE = 1e-3
ROUTINES: dict[str, Callable[[Question, float, Caps], dict[str, Any]]] = {
    "jax_privacy": _jax_privacy,
    "opake": _opake,
}


def child(task: dict[str, Any]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            caps = task["cap"], task["memory_gb"]
            facts = ROUTINES[task["peer"]](Question(**task["question"]), task["sigma"], caps)
            facts["outcome"] = "answered"
        except MemoryError as error:
            facts = {"outcome": f"out of memory: {error}"}
        except Exception as error:  # whatever a peer raises is its answer
            facts = {"outcome": f"{type(error).__name__}: {error}"}
    facts["peak_memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if messages := sorted({str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)}):
        facts["warnings"] = messages
    _say(**facts)


# ---- ours, and the comparison ----


def ours(question: Question) -> dict[str, Any]:
    """Our certificate on the same question, and the sampled estimate."""
    import torch

    from lambdacgd import cache
    from lambdacgd.accounting import accountant_for
    from lambdacgd.accounting.exact import TransferMatrix
    from lambdacgd.mechanisms import BISR, Horizon, LambdaCGD
    from lambdacgd.sampling import BallsInBins
    from reproduce.sampled import Sampled

    mechanism = LambdaCGD(question.lam) if question.lam is not None else BISR(question.bands or 0)
    row: dict[str, Any] = {}
    torch.set_num_threads(1)  # small matrices: on a busy machine a second thread only waits for the first
    with cache.disabled():
        TransferMatrix(0.9, 20, 2).sigma(2.0, 1e-3)  # warm-up: imports are not counted, ours no more than the peers'
        sampled = Sampled(mechanism, Horizon(question.b, question.k))
        cpu = time.process_time()
        estimate = sampled.sigma(question.epsilon, question.delta)
        row |= {"estimate": estimate.value, "estimate_relative_error": estimate.standard_error / estimate.value}
        row |= {"estimate_cpu_seconds": time.process_time() - cpu}
        cpu = time.process_time()
        bins = BallsInBins("fixed", examples=question.b, steps_per_epoch=question.b, epochs=question.k)
        found = accountant_for(mechanism, bins).sigma(question.epsilon, question.delta)
        row |= {"sigma": found.sigma, "method": found.certificate.method}
        row |= {"cpu_seconds": time.process_time() - cpu}
    return row


def compare(question: Question, *, cap: float = 120.0, memory_gb: float = 12.0) -> dict[str, Any]:
    """Ours and every peer on one question, one after the other, printed as they come."""
    row: dict[str, Any] = {"question": asdict(question), "load": os.getloadavg(), "ours": ours(question), "peers": []}
    mine = row["ours"]
    print(
        f"{question.name}\n  ours ({mine['method']}): σ = {mine['sigma']:.4f} in {mine['cpu_seconds']:.1f} CPU s; "
        f"estimate {mine['estimate']:.4f} in {mine['estimate_cpu_seconds']:.1f} CPU s", flush=True,
    )  # fmt: skip
    for peer in NAMES:
        answer = ask(peer, question, mine["sigma"], cap=cap, memory_gb=memory_gb)
        row["peers"].append(answer)
        print("  " + describe(answer), flush=True)
    return row


def describe(answer: dict[str, Any]) -> str:
    text = f"{answer['peer']} {answer['version'] or ''}: {answer['outcome']}"
    if answer.get("sigma"):
        text += (
            f", σ = {answer['sigma']:.4f} ({answer['sigma_over_ours']:.3f} of ours), CPU {answer['cpu_seconds']:.1f} s"
        )
    if "delta_at_our_sigma" in answer:
        text += f", δ at our σ {answer['delta_at_our_sigma']:.3e} ± {answer['delta_standard_error']:.1e}"
    if "epsilon_at_our_sigma" in answer:
        text += f", ε at our σ {answer['epsilon_at_our_sigma']:.4f}"
    if "projected_cpu_seconds" in answer and "sigma" not in answer:
        text += f"; {answer['samples']:,} of {answer['samples_needed']:,} samples drawn"
        text += f", all of them would take {answer['projected_cpu_seconds'] / 3600:.0f} CPU hours"
    if "probes_begun" in answer and "sigma" not in answer:
        # it evaluates the two ends of the range first; a third process is built when both are done
        done = "not past" if answer["probes_begun"] < 3 else f"{answer['probes_begun'] - 3} bisections past"
        text += f"; {done} the ends of its range, {answer['samples_a_probe_and_direction']:,} samples a direction each"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cap", type=float, default=120.0, help="CPU seconds for each answer of a peer")
    parser.add_argument("--memory-gb", type=float, default=12.0, help="memory for each peer, beyond its imports")
    parser.add_argument("--quick", action="store_true", help="the small questions only")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(json.loads(arguments.child))
        return
    result: dict[str, Any] = {"machine": measured_on("fixed-bins accountant", "Monte Carlo")}
    result |= {"cap_seconds": arguments.cap, "memory_gb": arguments.memory_gb}
    result["rows"] = []
    for question in SMALL if arguments.quick else (*SMALL, *PAPER):
        result["rows"].append(compare(question, cap=arguments.cap, memory_gb=arguments.memory_gb))
        if arguments.out:  # after every row: what an interruption cannot take
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
