"""Audits: what a run releases against what its plan says. See docs/audit.md."""

from lambdacgd.auditing.bounds import LowerBound, lower_bound
from lambdacgd.auditing.report import Report, audit

__all__ = ["LowerBound", "Report", "audit", "lower_bound"]
