"""Audits: what a run releases against what its plan says, and claims certified anew. See docs/audit.md."""

from lambdacgd.auditing.bounds import LowerBound, lower_bound, one_run_bound
from lambdacgd.auditing.report import Report, audit
from lambdacgd.auditing.verify import Verification, verify

__all__ = ["LowerBound", "Report", "Verification", "audit", "lower_bound", "one_run_bound", "verify"]
