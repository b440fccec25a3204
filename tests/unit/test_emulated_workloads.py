"""Emulated workloads: Table 4's means, and episodes that depend on nothing but what they may depend on."""

from __future__ import annotations

import functools
import itertools
import random
import statistics
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiderl.engines.emulated_language import NUM_ROLLS, act_id, answer_length, call_id
from tiderl.envs.builtin.emulated_workloads import (
    ALFWORLD,
    OSWORLD,
    SCIENCEBOARD,
    SCREENSHOT_TOKENS,
    WEBSHOP,
    Delay,
    Episode,
    Workload,
)

WORKLOADS = (WEBSHOP, ALFWORLD, OSWORLD, SCIENCEBOARD)
workloads = st.sampled_from(WORKLOADS)
skills = st.floats(0.0, 1.0)
rolls = st.lists(st.integers(0, NUM_ROLLS - 1), min_size=50, max_size=50)

#: Table 4: rounds and tokens a trajectory, at the start and at the end of training.
TABLE_4 = {
    "webshop": {0.0: (8, 3400), 1.0: (5, 2400)},
    "alfworld": {0.0: (16, 7400), 1.0: (11, 7400)},
    "osworld": {0.0: (35, 12_000), 1.0: (15, 12_000)},
    "scienceboard": {0.0: (39, 24_000), 1.0: (29, 23_000)},
}
NUM_EPISODES = 600


@functools.cache
def sample(workload: Workload, skill: float) -> tuple[list[int], list[int], list[bool]]:
    """Rounds, tokens and successes of many trajectories, each played and cut as the agent loop does it."""
    dice = random.Random(f"{workload.name} {skill}")
    rounds, tokens, successes = [], [], []
    for seed in range(NUM_EPISODES):
        episode = Episode(workload, "train", seed)
        observation, limit = episode.opening.observation, workload.max_context_tokens
        num_tokens = episode.opening.instruction_tokens + observation.num_tokens
        num_turns = 0
        while True:
            num_turns += 1
            roll = dice.randrange(NUM_ROLLS)
            answer = answer_length(call_id(observation.answer_tokens, exact=observation.exact), act_id(skill, roll))
            num_tokens += min(answer, limit - num_tokens)
            reply = episode.act(skill, roll)
            observation = reply.observation
            if reply.done or num_tokens + observation.num_tokens >= limit:
                break
            num_tokens += observation.num_tokens
        rounds.append(num_turns)
        tokens.append(num_tokens)
        successes.append(reply.success)
    return rounds, tokens, successes


@pytest.mark.parametrize("skill", [0.0, 1.0])
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_rounds_and_tokens_have_the_means_of_table_4(workload: Workload, skill: float) -> None:
    mean_rounds, mean_tokens = TABLE_4[workload.name][skill]
    rounds, tokens, _ = sample(workload, skill)
    # The dice are fixed. A mean of 600 has a standard error of about 1.3 %: a spread of 0.3 over the root of 600.
    assert statistics.fmean(rounds) == pytest.approx(mean_rounds, rel=0.05)
    assert statistics.fmean(tokens) == pytest.approx(mean_tokens, rel=0.05)
    assert 1 <= min(rounds) < mean_rounds < max(rounds) <= workload.max_rounds
    assert max(tokens) <= workload.max_context_tokens


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_half_trained_is_halfway(workload: Workload) -> None:
    rounds, tokens, _ = sample(workload, 0.5)
    (start_rounds, start_tokens), (end_rounds, end_tokens) = TABLE_4[workload.name].values()
    assert statistics.fmean(rounds) == pytest.approx((start_rounds + end_rounds) / 2, rel=0.08)
    assert statistics.fmean(tokens) == pytest.approx((start_tokens + end_tokens) / 2, rel=0.08)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_success_grows_with_skill(workload: Workload) -> None:
    start, end = (statistics.fmean(sample(workload, skill)[2]) for skill in (0.0, 1.0))
    assert 0.0 < start < end < 1.0
    # Of 600: a standard error of 2 % at most. What the limits cut has failed: up to a quarter of the episodes.
    assert 0.7 * workload.success.start - 0.06 < start < workload.success.start + 0.06
    assert 0.7 * workload.success.end - 0.06 < end < workload.success.end + 0.06


@given(workloads, st.integers(0, 2**40), skills, rolls)
@settings(max_examples=50)
def test_an_episode_is_a_function_of_its_seed_and_actions(
    workload: Workload, seed: int, skill: float, rolls: list[int]
) -> None:
    first, second = Episode(workload, "train", seed), Episode(workload, "train", seed)
    assert first.opening == second.opening
    for roll in rolls:
        reply = first.act(skill, roll)
        assert reply == second.act(skill, roll)
        assert reply.observation.num_tokens >= 1
        assert 0.0 < reply.delay_s <= workload.step.max_s
        if reply.done:
            break
    assert reply.done


@given(workloads, st.integers(0, 1000), skills)
def test_siblings_part_at_their_first_action(workload: Workload, seed: int, skill: float) -> None:
    first, second, third = (Episode(workload, "train", seed) for _ in range(3))
    fillers = [
        first.act(skill, 1).observation.filler,
        second.act(skill, 2).observation.filler,
        third.act(skill / 2 + 0.5 if skill < 1.0 else 0.0, 1).observation.filler,
    ]
    assert len(set(fillers)) == 3


def test_tasks_and_splits_begin_differently_and_workloads_with_another_instruction() -> None:
    openings = [
        Episode(workload, split, seed).opening
        for workload in WORKLOADS
        for split in ("train", "test")
        for seed in range(5)
    ]
    assert len({opening.observation.filler for opening in openings}) == len(openings)
    assert len({opening.instruction_filler for opening in openings}) == len(WORKLOADS)
    assert len({(opening.instruction_filler, opening.instruction_tokens) for opening in openings}) == len(WORKLOADS)


def test_an_episode_is_the_same_in_another_process() -> None:
    program = (
        "from tiderl.envs.builtin.emulated_workloads import OSWORLD, Episode\n"
        "episode = Episode(OSWORLD, 'train', 3); print(episode.opening, episode.act(0.25, 7))"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    episode = Episode(OSWORLD, "train", 3)
    assert other.stdout.strip() == f"{episode.opening} {episode.act(0.25, 7)}"


@given(workloads, st.floats(-5.0, 5.0), skills, skills)
def test_wanted_rounds_never_rise_with_skill(workload: Workload, luck: float, one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert 1 <= workload.wanted_rounds(high, luck) <= workload.wanted_rounds(low, luck)


@given(workloads, skills)
def test_the_cut_log_normal_has_the_mean_that_its_median_was_solved_for(workload: Workload, skill: float) -> None:
    # At the ends the means are the table's; `statistics` takes the same log-normal at 2,000 evenly spaced quantiles.
    end = round(skill)
    quantiles = statistics.NormalDist().quantiles(2001)
    drawn = [min(workload.wanted_rounds(end, luck), workload.max_rounds) for luck in quantiles]
    assert statistics.fmean(drawn) == pytest.approx(workload.rounds.at(end), rel=0.003)


def test_weights_that_change_in_an_episode_end_it_sooner() -> None:
    slow = replace(OSWORLD, rounds_sigma=1e-9)
    episode = Episode(slow, "train", 0)
    for _ in range(20):
        assert not episode.act(0.0, 5).done
    assert episode.act(1.0, 5).done  # 15 rounds were enough, had it known


def test_a_screenshot_has_qwen3_vls_tokens() -> None:
    # Sides rounded to multiples of 32 pixels, as `smart_resize` rounds them, of 32 pixels a token.
    width, height = round(1280 / 32) * 32, round(720 / 32) * 32
    assert (width, height) == (1280, 704)
    assert width * height // 32**2 + 2 == SCREENSHOT_TOKENS


@pytest.mark.parametrize("skill", [0.0, 1.0])
@pytest.mark.parametrize("workload", [OSWORLD, SCIENCEBOARD], ids=lambda workload: workload.name)
def test_as_many_screenshots_count_as_the_window_keeps(workload: Workload, skill: float) -> None:
    # Without the text, an observation that shows a screenshot has its tokens and one of text.
    bare = replace(workload, observation_tokens=replace(workload.observation_tokens, start=1e-9, end=1e-9))
    counts = []
    for seed in range(300):
        episode, count = Episode(bare, "train", seed), 1
        for roll in itertools.count():
            reply = episode.act(skill, roll)
            if reply.done:
                break
            count += reply.observation.num_tokens > SCREENSHOT_TOKENS
        counts.append(count)
    assert statistics.fmean(counts) == pytest.approx(workload.num_screenshots.at(skill), rel=0.06)


def test_delays_are_log_normal_and_cut() -> None:
    dice = random.Random(0)
    drawn = sorted(Delay(2.0, 0.5, 4.0).draw_s(dice) for _ in range(4000))
    assert drawn[2000] == pytest.approx(2.0, rel=0.05)
    assert drawn[-1] == 4.0
    # exp(0.5 z) >= 2 for z >= 2 ln 2 = 1.386: 8.3 % are cut.
    assert sum(delay_s == 4.0 for delay_s in drawn) / 4000 == pytest.approx(0.083, abs=0.015)
