"""What a verification found: problems by object and unit. Knows nothing of how they are found."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is not as it should be; `name` is an object of the run."""

    name: str
    message: str
    unit: int | None = None


@dataclass(slots=True)
class VerifyReport:
    """What a verification looked at and what it found wrong."""

    deep: bool
    units: int = 0
    objects: int = 0
    bytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    held: dict[tuple[str, ...], list[int]] = field(default_factory=dict)
    """Which sites units of stored prompts hold -> those units."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems

    @property
    def damaged_units(self) -> list[int]:
        """The units that have a problem of their own, which a repair can capture again."""
        return sorted({problem.unit for problem in self.problems if problem.unit is not None})

    def include(self, other: VerifyReport) -> None:
        """Add what another report found."""
        self.units += other.units
        self.objects += other.objects
        self.bytes += other.bytes
        self.problems += other.problems
        for sites, units in other.held.items():
            self.held.setdefault(sites, []).extend(units)

    def add(self, name: str, message: object, unit: int | None = None) -> None:
        self.problems.append(Problem(name, str(message), unit))
