"""Contracts of user hooks, checked on a scripted engine in seconds: what `slime check` and the contract tests
run.

Public: `Stage` (engine, arguments, samples), `CONTRACTS` (by flag), `case_of`, `judge`, `Finding`, `check`.
"""

from slime.contracts.finding import Contract, ContractError, Finding, NotApplicableError, judge
from slime.contracts.report import check, script
from slime.contracts.stage import Stage
from slime.contracts.suite import CONTRACTS, case_of, findings, named_hooks

__all__ = [
    "CONTRACTS",
    "Contract",
    "ContractError",
    "Finding",
    "NotApplicableError",
    "Stage",
    "case_of",
    "check",
    "findings",
    "judge",
    "named_hooks",
    "script",
]
