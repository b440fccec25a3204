"""Workloads as sizes and times: how many turns an episode takes, how long its texts are, how long its environment works.

Table 4 of the paper gives rounds and tokens a trajectory, before and after training; the rest are choices, each beside its figure.
Pure: the emulated environments play these episodes behind HTTP, the simulator plays them in virtual time.

    trajectory = instruction + first observation + rounds x answer + (rounds - 1) x observation

Rounds are log-normal with an episode's own luck, half of it the task's and half of it the trajectory's, and cut at the workload's
limit; answers and observations vary from turn to turn. All means move linearly with the model's skill, the share of the training
that it has behind it, so that rounds fall in the middle of an episode if the weights change there.

Contexts only grow here: the image window of the multi-modal workloads is not emulated. Of an episode's screenshots only as many are
counted as the window keeps in a context (5-9 for OSWorld, 8-15 for ScienceBoard), spread over the turns, which is what Table 4's
tokens hold: 35 screenshots of 882 tokens would be 2.6 times OSWorld's 12,000.

Invariants (tests/unit/test_emulated_workloads.py):

1. Over many seeds rounds and trajectory tokens, cut at the limits, have Table 4's means at skill 0 and at skill 1.
2. An episode is a function of workload, split, seed and the actions (skill and roll) so far.
3. Siblings (same split and seed) begin alike, and differ from their first action on.
4. Rounds never fall below 1 or exceed the limit, and never rise with skill where their mean falls.

Source: paper Table 4 (restated in paper.md §6).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import Final

from tiderl.envs.builtin.emulated_sizes import MAX_ANSWER_TOKENS, MAX_SEED, SPREAD, ObservationSizes

#: A 1280x720 screenshot in Qwen3-VL tokens. Patches are 16 pixels wide and merged 2 x 2 (Qwen3VLVisionConfig: patch_size,
#: spatial_merge_size), so that a token is 32 pixels wide. `smart_resize` of its processor rounds both sides to multiples of that,
#: 720 / 32 = 22.5 to the even 22: 40 x 22 tokens, and one before and one behind them (vision_start, vision_end).
SCREENSHOT_TOKENS: Final = 40 * 22 + 2
#: Sigma of the logarithm of an observation's tokens. The recorded sessions have 0.5 (MiniWoB), 0.8 (ScienceWorld), 1.5 (WebShop,
#: where every second observation is "OK.").
OBSERVATION_SPREAD: Final = 0.5


@dataclass(frozen=True, slots=True)
class Course:
    """A figure that moves over training, from `start` (skill 0) to `end` (skill 1)."""

    start: float
    end: float

    def at(self, skill: float) -> float:
        return self.start + (self.end - self.start) * skill


@dataclass(frozen=True, slots=True)
class Delay:
    """Seconds that an environment works: log-normal, cut at `max_s`."""

    median_s: float
    sigma: float
    max_s: float

    def draw_s(self, random_: random.Random) -> float:
        return min(self.median_s * math.exp(self.sigma * random_.gauss()), self.max_s)


@dataclass(frozen=True)
class Workload:
    """What Table 4 says of a workload, and what it leaves open. Tokens are means."""

    name: str
    #: The instruction is the same text for all of its tasks, and another one than other workloads': this is its filler's seed.
    instruction_filler: int
    instruction_tokens: int
    #: Of the first observation, less its screenshot.
    task_tokens: int
    rounds: Course
    rounds_sigma: float
    max_rounds: int
    #: Where the agent cuts an episode (`model.max_context_tokens`).
    max_context_tokens: int
    answer_tokens: Course
    #: Of an observation's text.
    observation_tokens: Course
    #: Screenshots in a whole trajectory, the first observation's included. 0: a workload without.
    num_screenshots: Course
    reset: Delay
    step: Delay
    #: Probability of success within the limit of rounds.
    success: Course

    @cached_property
    def round_medians(self) -> Course:
        """Medians of the log-normals that, cut at `max_rounds`, have the means `rounds`."""
        ends = (self.rounds.start, self.rounds.end)
        return Course(*(_median(mean, self.rounds_sigma, self.max_rounds) for mean in ends))

    def wanted_rounds(self, skill: float, luck: float) -> int:
        """Turns that the task needs, be there a limit or not; `luck` is normally distributed."""
        return max(1, round(self.round_medians.at(skill) * math.exp(self.rounds_sigma * luck)))

    def screenshot_share(self, skill: float) -> float:
        """Share of the observations after the first one that count a screenshot."""
        if self.num_screenshots.start == 0:
            return 0.0
        return (self.num_screenshots.at(skill) - 1) / (self.rounds.at(skill) - 1)


@dataclass(frozen=True, slots=True)
class Opening:
    """How an episode begins."""

    instruction_filler: int
    instruction_tokens: int
    observation: ObservationSizes
    delay_s: float


@dataclass(frozen=True, slots=True)
class Reply:
    """What an action leads to. Seconds are the job's (`tiderl.clock`)."""

    observation: ObservationSizes
    delay_s: float
    reward: float
    done: bool
    success: bool


class Episode:
    """One trajectory of a workload. `opening` is how it begins, `act` plays it on."""

    def __init__(self, workload: Workload, split: str, seed: int) -> None:
        # Seeding with text goes through SHA-512: equal on every machine, and no two neighbours are alike.
        random_ = random.Random(f"{workload.name}/{split}/{seed}")
        self._workload = workload
        self._task_luck = random_.gauss()
        self._luck = 0.0
        self._fortune = 0.0
        self._num_turns = 0
        num_tokens = _about(workload.task_tokens, OBSERVATION_SPREAD, random_)
        if workload.num_screenshots.start:
            num_tokens += SCREENSHOT_TOKENS
        #: Stands for all that has happened so far.
        self._history = random_.randrange(MAX_SEED)
        self.opening = Opening(
            workload.instruction_filler,
            workload.instruction_tokens,
            self._observation(num_tokens, skill=0.0),
            workload.reset.draw_s(random_),
        )

    def act(self, skill: float, roll: int) -> Reply:
        """Play an answer of a model of that skill, in [0, 1]. Not after the end."""
        workload, random_ = self._workload, random.Random(f"{self._history}/{skill}/{roll}")
        self._history = random_.randrange(MAX_SEED)
        if self._num_turns == 0:
            self._luck = (self._task_luck + random_.gauss()) / math.sqrt(2.0)
            self._fortune = random_.random()
        self._num_turns += 1
        num_tokens = _about(workload.observation_tokens.at(skill), OBSERVATION_SPREAD, random_)
        if random_.random() < workload.screenshot_share(skill):
            num_tokens += SCREENSHOT_TOKENS
        wanted = workload.wanted_rounds(skill, self._luck)
        done = self._num_turns >= min(wanted, workload.max_rounds)
        success = done and wanted <= workload.max_rounds and self._fortune < workload.success.at(skill)
        return Reply(self._observation(num_tokens, skill), workload.step.draw_s(random_), float(success), done, success)

    def _observation(self, num_tokens: int, skill: float) -> ObservationSizes:
        # A call says the median of the answer's length, which is log-normal.
        median = self._workload.answer_tokens.at(skill) / math.exp(SPREAD**2 / 2)
        return ObservationSizes(self._history, num_tokens, min(max(1, round(median)), MAX_ANSWER_TOKENS), exact=False)


def _about(mean: float, sigma: float, random_: random.Random) -> int:
    """A log-normal draw with that mean, 1 at least."""
    return max(1, round(mean * math.exp(sigma * random_.gauss() - sigma**2 / 2)))


def _median(mean: float, sigma: float, limit: int) -> float:
    """Of the log-normal whose draws, rounded and cut to 1 .. `limit`, have that mean."""
    assert 1.0 < mean < limit, (mean, limit)
    standard = NormalDist()

    def cut_mean(median: float) -> float:
        # The mean of a number from 1 on is the sum of P(number >= k).
        return 1.0 + sum(1.0 - standard.cdf(math.log((k - 0.5) / median) / sigma) for k in range(2, limit + 1))

    low, high = 0.5, 100.0 * limit
    for _ in range(60):  # halves [0.5, 100 * limit] down to less than a float tells apart
        middle = math.sqrt(low * high)
        low, high = (middle, high) if cut_mean(middle) < mean else (low, middle)
    return low


# Rounds, tokens a trajectory and limits of turns and tokens are Table 4's; the limit of the multi-modal contexts is not in it.
# Answers and instructions: a turn has 2-3 times the tokens of the recorded ReAct sessions (traces/README.md), and so have the
# few-shot instructions of those (575 tokens WebShop, 1,650 AlfWorld). Sigma of the rounds: 0.28 in the recorded WebShop sessions;
# less for AlfWorld and ScienceBoard, whose mean tokens are near the limit already. Success rates are choices.
WEBSHOP: Final = Workload(
    name="webshop",
    instruction_filler=1,
    instruction_tokens=700,
    task_tokens=257,
    rounds=Course(8, 5),
    rounds_sigma=0.3,
    max_rounds=20,
    max_context_tokens=8192,
    # 957 + 8 * 110 + 7 * 223.3 = 3400, and 957 + 5 * 110 + 4 * 223.3 = 2400
    answer_tokens=Course(110, 110),
    observation_tokens=Course(223.3, 223.3),
    num_screenshots=Course(0, 0),
    # A page of a web application: MiniWoB's figures, measured with a browser (median step 0.10 s, p99 0.75 s; reset 0.14 s).
    reset=Delay(0.15, 0.5, 10.0),
    step=Delay(0.10, 0.75, 10.0),
    success=Course(0.3, 0.75),
)
ALFWORLD: Final = Workload(
    name="alfworld",
    instruction_filler=2,
    instruction_tokens=4000,
    task_tokens=400,
    rounds=Course(16, 11),
    rounds_sigma=0.25,
    max_rounds=20,
    max_context_tokens=8192,
    # Fewer rounds with as many tokens: longer turns. 4400 + 16 * 80 + 15 * 114.7 = 7400, and 4400 + 11 * 130 + 10 * 157 = 7400.
    answer_tokens=Course(80, 130),
    observation_tokens=Course(114.7, 157),
    num_screenshots=Course(0, 0),
    # Measured: a step takes 0.03-0.19 s, a reset 0.2-2.3 s (facts-environments.md); the spread is that of ScienceWorld's steps.
    reset=Delay(0.7, 0.6, 20.0),
    step=Delay(0.08, 0.75, 10.0),
    success=Course(0.3, 0.85),
)
OSWORLD: Final = Workload(
    name="osworld",
    instruction_filler=3,
    instruction_tokens=1400,
    task_tokens=100,
    rounds=Course(35, 15),
    rounds_sigma=0.3,
    max_rounds=50,
    max_context_tokens=32_768,
    # 1500 + 5 * 882 + 35 * 92.4 + 34 * 84 = 12000, and 1500 + 9 * 882 + 15 * 92.4 + 14 * 84 = 12000
    answer_tokens=Course(92.4, 92.4),
    observation_tokens=Course(84, 84),
    num_screenshots=Course(5, 9),
    # A desktop in a virtual machine: OSWorld waits 2 s after an action before it takes the screenshot (`step(action, pause=2)`),
    # to which MiniWoB's 0.1 s for a screenshot is added. Not measured here: a reset, which reverts the machine to a snapshot.
    reset=Delay(15.0, 0.4, 60.0),
    step=Delay(2.1, 0.3, 30.0),
    success=Course(0.15, 0.4),
)
SCIENCEBOARD: Final = Workload(
    name="scienceboard",
    instruction_filler=4,
    instruction_tokens=2500,
    task_tokens=351,
    rounds=Course(39, 29),
    rounds_sigma=0.2,
    max_rounds=50,
    max_context_tokens=32_768,
    # 2851 + 10 * 882 + 39 * 150 + 38 * 170.5 = 24000, and 2851 + 12.5 * 882 + 29 * 150 + 28 * 170.5 = 23000
    answer_tokens=Course(150, 150),
    observation_tokens=Course(170.5, 170.5),
    num_screenshots=Course(10, 12.5),
    # Desktop applications in the same kind of machine as OSWorld's.
    reset=Delay(15.0, 0.4, 60.0),
    step=Delay(2.1, 0.3, 30.0),
    success=Course(0.1, 0.3),
)
