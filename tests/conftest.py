"""What all tests share: one Hypothesis profile, and a check that no test leaves a child process behind."""

from __future__ import annotations

import os
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import settings

# Examples take as long as a shared machine lets them; a deadline would make tests fail by load.
settings.register_profile("tiderl", deadline=None, print_blob=True)
# CI judges a commit: the same commit must get the same examples. New ones are looked for on developers' machines.
settings.register_profile("ci", settings.get_profile("tiderl"), derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "tiderl"))


@pytest.fixture(scope="module", autouse=True)
def no_process_left_behind() -> Iterator[None]:
    """Every module ends with the child processes that it began with."""
    before = set(psutil.Process().children(recursive=True))
    yield
    new = [child for child in psutil.Process().children(recursive=True) if child not in before]
    # multiprocessing's own bookkeeping process lives as long as the interpreter.
    left = [
        child for child in psutil.wait_procs(new, timeout=5)[1] if "resource_tracker" not in " ".join(child.cmdline())
    ]
    assert not left, f"processes left behind: {[(child.pid, child.cmdline()) for child in left]}"
