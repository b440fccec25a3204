"""Fixtures of the trainer's tests: worlds of actors, started when a test of the module first wants them, and the tiny models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conformance.trainer_actors import Actors, make_model


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Actors]]:
    started: dict[int, Actors] = {}
    folder = tmp_path_factory.mktemp("stores")

    def world(size: int) -> Actors:
        if size not in started:
            started[size] = Actors(size, folder)
        return started[size]

    yield world
    for actors in started.values():
        actors.close()


@pytest.fixture(params=[1, 2], ids=["1 actor", "2 actors"])
def actors(request: pytest.FixtureRequest, worlds: Callable[[int], Actors]) -> Actors:
    return worlds(request.param)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    for name, kind, tied in (("tied", "Qwen2", True), ("untied", "Qwen3", False), ("llama", "Llama", False)):
        make_model(folder / name, kind, tied)
    (folder / "tied" / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    return {path.name: path for path in folder.iterdir()}
