"""Injected latency: repeatable, with the distribution that its text promises."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiderl.envs import latency
from tiderl.errors import ConfigError


def test_none_and_constant() -> None:
    assert latency.parse("none").delay_s(1, 2) == 0.0
    assert latency.parse("constant:0.25").delay_s(1, 2) == 0.25


def test_lognormal_has_the_median_and_the_sigma_that_it_was_given() -> None:
    drawn = latency.parse("lognormal:0.04,0.5,1000")
    logarithms = [math.log(drawn.delay_s(seed, turn)) for seed in range(200) for turn in range(20)]
    # 4,000 draws: standard errors are 0.5 / sqrt(4000) = 0.008 of the mean and about 0.006 of the deviation; five of them.
    assert statistics.fmean(logarithms) == pytest.approx(math.log(0.04), abs=0.04)
    assert statistics.stdev(logarithms) == pytest.approx(0.5, abs=0.03)


@given(st.integers(0, 2**63), st.integers(0, 100), st.floats(0.0, 1e6))
def test_no_delay_is_above_the_cap(session_seed: int, turn: int, sigma: float) -> None:
    assert 0.0 <= latency.parse(f"lognormal:0.04,{sigma},0.3").delay_s(session_seed, turn) <= 0.3


def test_a_delay_depends_on_all_three_seeds_and_on_nothing_else() -> None:
    text = "lognormal:0.04,1.0,0.3"
    base = latency.parse(text, 1).delay_s(2, 3)
    assert latency.parse(text, 1).delay_s(2, 3) == base
    assert base not in (
        latency.parse(text, 9).delay_s(2, 3),
        latency.parse(text, 1).delay_s(9, 3),
        latency.parse(text, 1).delay_s(2, 9),
    )
    program = f"from tiderl.envs import latency; print(latency.parse({text!r}, 1).delay_s(2, 3))"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert float(other.stdout) == base


@pytest.mark.parametrize(
    "numbers", ["0.04", "0.04,1", "0,1,1", "0.5,1,0.3", "0.04,-1,1", "0.04,1,inf", "0.04,1,1,1", "a,b,c"]
)
def test_bad_lognormals_are_refused(numbers: str) -> None:
    with pytest.raises(ConfigError) as error:
        latency.parse(f"lognormal:{numbers}")
    assert error.value.path == "latency"


@pytest.mark.parametrize(
    "text", ["", "fast", "none:1", "constant", "constant:", "constant:x", "constant:-1", "constant:nan", "constant:1,2"]
)
def test_bad_texts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        latency.parse(text)
    assert error.value.path == "latency"
