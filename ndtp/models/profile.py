"""`chunks="auto"` by a hardware profile, in the place of a measurement."""

from __future__ import annotations

from pathlib import Path

from ndtp.collectives.cross_check import cross_check
from ndtp.planner.hardware import PUBLISHED, Hardware
from ndtp.planner.speeds import speeds_of
from ndtp.runtime.process_grid import ProcessGrid


def use_profile(mesh: ProcessGrid, hardware: str | Path | Hardware) -> None:
    """Choose numbers of chunks on a grid by a profile from now on, such as `ndtp bench calibrate` writes.

    Nothing is measured where a product first runs, and every run chooses alike.  A collective, before the first step:
    what was chosen before stays.  Of a dtype that the profile has no rate for, it says nothing.

    Raises:
        GridError: no such preset, or a file without the fields of a profile.
        MismatchError: ranks read different profiles.
    """
    _use(mesh, Hardware.load(hardware))


def use_measured(mesh: ProcessGrid, hardware: str | Path | Hardware) -> None:
    """A profile that was measured; what others published does not tell what processes at hand do."""
    profile = Hardware.load(hardware)
    if profile.source != PUBLISHED:
        _use(mesh, profile)


def _use(mesh: ProcessGrid, profile: Hardware) -> None:
    cross_check(mesh.groups, f"profile {profile.to_toml()}", "the hardware profile", "the same file on every machine")
    mesh.step.chunks.profile = lambda grid, dtype: speeds_of(profile, grid, dtype)
