"""Every conformance case of the repository, by name."""

from __future__ import annotations

from tests.conformance import (
    cases_collectives,
    cases_control,
    cases_moves,
    cases_registers,
    cases_schedule,
    cases_signals,
    cases_tensor_core,
    cases_tiles,
    cases_vectors,
)
from tests.conformance.case import Case

MODULES = (
    cases_moves,
    cases_registers,
    cases_tiles,
    cases_schedule,
    cases_signals,
    cases_tensor_core,
    cases_control,
    cases_collectives,
    cases_vectors,
)
CASES: dict[str, Case] = {}
for _module in MODULES:
    for _case in _module.CASES:
        if _case.name in CASES:
            raise ValueError(f"two cases are called {_case.name}")
        CASES[_case.name] = _case


def program(name: str) -> object:
    """The specialisation of a case; a function that worker processes can find."""
    return CASES[name].program()
