"""Invariants of `tiderl.engines.device_thread`, with a step that only counts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator

import pytest

from tiderl.engines.device_thread import DeviceThread
from tiderl.errors import EngineError, WaitTimeout

BOUND_S = 20.0


class Steps:
    """A step function that has `left` pieces of work, and can be held at a gate."""

    def __init__(self) -> None:
        self.left = 0
        self.log: list[str] = []
        self.on_step: Callable[[], object] = lambda: None

    def __call__(self) -> bool:
        if self.left:
            self.left -= 1
            self.log.append("step")
            self.on_step()
        return self.left > 0


@pytest.fixture
def steps() -> Steps:
    return Steps()


@pytest.fixture
def thread(steps: Steps) -> Iterator[DeviceThread]:
    thread = DeviceThread("test device thread", steps)
    thread.start()
    yield thread
    if thread.is_running():
        thread.stop(timeout_s=BOUND_S, setting="test")


def call(thread: DeviceThread, function: Callable[[], object]) -> object:
    return thread.call(function, timeout_s=BOUND_S, waited_for="a test", setting="test")


async def test_functions_run_in_order_on_the_one_thread(thread: DeviceThread) -> None:
    seen: list[tuple[int, bool]] = []
    for number in range(100):
        thread.post(lambda number=number: seen.append((number, thread.is_current())))  # type: ignore[misc]
    await thread.submit(lambda: None)
    assert seen == [(number, True) for number in range(100)]
    assert not thread.is_current()


async def test_a_submitted_function_gives_its_result_or_its_exception(thread: DeviceThread) -> None:
    assert await thread.submit(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        await thread.submit(lambda: 1 // 0)
    assert await thread.submit(lambda: 8) == 8


def test_functions_run_between_steps_and_steps_go_on_between_functions(thread: DeviceThread, steps: Steps) -> None:
    def again(times: int) -> None:
        steps.log.append("function")
        if times > 1:
            thread.post(lambda: again(times - 1))

    def begin() -> None:
        steps.left = 3
        again(3)

    call(thread, begin)
    while call(thread, lambda: steps.left):
        pass
    # A function that posts itself again comes after the next step, not before it.
    assert steps.log == ["function", "step", "function", "step", "function", "step"]


async def test_the_outcomes_of_one_step_wake_the_loop_once(
    thread: DeviceThread, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    futures = [loop.create_future() for _ in range(50)]

    def finish_all() -> None:
        for index, future in enumerate(futures):
            thread.resolve(future, index)

    steps.on_step = finish_all
    wakeups: list[object] = []
    real = loop.call_soon_threadsafe

    def counted(callback: Callable[..., object], *args: object) -> object:
        wakeups.append(callback)
        return real(callback, *args)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    thread.post(lambda: setattr(steps, "left", 1))
    async with asyncio.timeout(BOUND_S):
        assert await asyncio.gather(*futures) == list(range(50))
    assert len(wakeups) == 1


async def test_what_finished_is_told_before_a_long_function_runs(thread: DeviceThread) -> None:
    done, gate, held = asyncio.get_running_loop().create_future(), threading.Event(), threading.Event()
    thread.post(lambda: gate.wait(BOUND_S))
    # While the thread waits at the gate, both queue up for the same round.
    thread.post(lambda: thread.resolve(done, "told"))
    long = asyncio.create_task(thread.submit(lambda: held.wait(BOUND_S)))
    await asyncio.sleep(0)
    gate.set()
    async with asyncio.timeout(BOUND_S):
        assert await done == "told"
    assert not long.done()
    held.set()
    assert await long


async def test_a_function_cancelled_before_its_turn_does_not_run(thread: DeviceThread) -> None:
    held, ran = threading.Event(), []
    thread.post(lambda: held.wait(BOUND_S))
    task = asyncio.create_task(thread.submit(lambda: ran.append(1)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    held.set()
    await thread.submit(lambda: None)
    assert ran == []


async def test_an_outcome_for_a_cancelled_future_is_dropped(thread: DeviceThread) -> None:
    future = asyncio.get_running_loop().create_future()
    future.cancel()
    thread.post(lambda: thread.resolve(future, 1))
    assert await thread.submit(lambda: 2) == 2


def test_outcomes_for_a_closed_loop_do_not_hurt(thread: DeviceThread, caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.new_event_loop()
    future = loop.create_future()
    loop.close()
    thread.post(lambda: thread.resolve(future, 1))
    call(thread, lambda: None)
    assert call(thread, lambda: 3) == 3
    assert "after their event loop was closed" in caplog.text


def test_call_is_bounded(thread: DeviceThread) -> None:
    held = threading.Event()
    with pytest.raises(WaitTimeout, match=r"in vain \(bound: timeouts.some_s\)"):
        thread.call(lambda: held.wait(BOUND_S), timeout_s=0.01, waited_for="a gate", setting="timeouts.some_s")
    held.set()


def test_stop_runs_what_came_before_and_refuses_what_comes_later(thread: DeviceThread) -> None:
    seen: list[int] = []
    for number in range(10):
        thread.post(lambda number=number: seen.append(number))  # type: ignore[misc]
    thread.stop(timeout_s=BOUND_S, setting="test")
    assert seen == list(range(10))
    assert not thread.is_running()
    with pytest.raises(EngineError, match="stopped"):
        thread.post(lambda: None)


def test_stop_is_bounded(thread: DeviceThread) -> None:
    held = threading.Event()
    thread.post(lambda: held.wait(BOUND_S))
    with pytest.raises(WaitTimeout):
        thread.stop(timeout_s=0.01, setting="timeouts.shutdown_s")
    held.set()


def test_a_busy_thread_can_be_stopped(thread: DeviceThread, steps: Steps) -> None:
    call(thread, lambda: setattr(steps, "left", 1 << 60))
    thread.stop(timeout_s=BOUND_S, setting="test")
    assert 0 < steps.left < 1 << 60
