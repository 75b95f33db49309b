"""Plans made beforehand: machines that train need no accountant, and a run without its plan is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lambdacgd.planning import Plan, plan
from lambdacgd.validation import InvalidInput
from reproduce.json_lines import append, records
from reproduce.runs import TrainingRun


class MissingPlan(InvalidInput):
    """A run whose plan is not in the book."""


class PlanBook:
    """Plans by what was asked of ``lc.plan``, in a file of JSON lines. With ``make`` missing ones are made and added.

    Guarantee
    ---------
    σ is the plan's own: every plan read back is checked against its digest, its request is compared with what it
    holds, and training checks the plan once more.
    """

    def __init__(self, path: Path | None = None, *, make: bool = False) -> None:
        self.path, self.make = path, make
        self._plans: dict[str, Plan] = {}
        if path is not None:
            for content in records(path):
                self._plans[_key(content["request"])] = Plan.from_json(json.dumps(content["plan"]))

    def __len__(self) -> int:
        return len(self._plans)

    def __contains__(self, request: dict[str, Any]) -> bool:
        return _key(request) in self._plans

    def get(self, request: dict[str, Any]) -> Plan:
        """The plan of a request."""
        found = self._plans.get(_key(request))
        if found is None:
            if not self.make:
                raise MissingPlan("plan", _key(request), f"it is not in {self.path}; make it where the accountants are")
            found = plan(**request)
            self._plans[_key(request)] = found
            if self.path is not None:
                append(self.path, {"request": request, "plan": found.to_dict()})
        _check(request, found)
        return found

    def for_run(self, run: TrainingRun, training_examples: int) -> Plan:
        """The plan that ``run`` trains under."""
        return self.get(run.plan_request(training_examples))


def _check(request: dict[str, Any], found: Plan) -> None:
    for name in ("examples", "batch_size", "epochs", "epsilon", "delta"):
        if getattr(found, name) != request[name]:
            raise InvalidInput(name, getattr(found, name), f"the plan was asked for {request[name]}; make it anew")
    sampling = found.sampling.to_dict()
    same = found.mechanism.name == request["mechanism"] and sampling["name"] == request["sampling"]
    same &= sampling.get("bins") == request.get("bins")
    if "lam" in request:
        same &= found.mechanism.to_dict().get("lam") == request["lam"]
    if not same:
        raise InvalidInput("plan", found.digest[:12], "it is not what was asked for; make it anew")


def _key(request: dict[str, Any]) -> str:
    return json.dumps(request, sort_keys=True)
