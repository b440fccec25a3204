"""Which engine, trainer, reference and chat format a rank gets, by the settings' kinds; each is imported when it is chosen."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING

from tiderl.config.schema import Config
from tiderl.worker.context import WorkerContext

if TYPE_CHECKING:
    from tiderl.agent.loop import Chat
    from tiderl.engines.base import Engine
    from tiderl.trainers.base import Reference, Trainer


def make_trainer(context: WorkerContext, world_size: int) -> Trainer:
    config = context.config
    assert context.actor_group is not None and context.storage_group is not None
    if config.trainer.kind == "emulated":
        from tiderl.profiles.files import load
        from tiderl.trainers.emulated import EmulatedTrainer

        costs = load(config.emulate.hardware, config.emulate.model)
        num_receivers = world_size - config.roles.num_actors - config.roles.num_ref
        return EmulatedTrainer(config, context.actor_group, costs, context.clock, num_receivers)
    from tiderl.trainers.fsdp import FsdpTrainer

    return FsdpTrainer(config, context.actor_group, context.storage_group, context.device)


def make_reference(context: WorkerContext, beside: Trainer | None = None) -> Reference:
    """For a Ref rank, or for an actor's rank: `beside` its trainer."""
    config = context.config
    if config.trainer.kind == "emulated":
        from tiderl.profiles.files import load
        from tiderl.trainers.emulated import EmulatedTrainer
        from tiderl.trainers.emulated_reference import EmulatedReference

        costs = load(config.emulate.hardware, config.emulate.model)
        memory = beside.memory if isinstance(beside, EmulatedTrainer) else None
        return EmulatedReference(config, costs, context.clock, memory)
    from tiderl.trainers.reference import HostedReference

    return HostedReference(config, context.device)


def make_engine(context: WorkerContext) -> Engine:
    config = context.config
    if config.engine.kind == "emulated":
        from tiderl.engines.emulated import EmulatedEngine
        from tiderl.profiles.files import load

        costs = load(config.emulate.hardware, config.emulate.model)
        return EmulatedEngine(config, costs, context.clock, context.rank)
    from tiderl.engines.vllm import VllmEngine

    return VllmEngine(config)


async def make_chat(config: Config) -> Chat:
    if config.engine.kind == "emulated":
        from tiderl.agent.emulated_chat import EmulatedChat

        return EmulatedChat(config.emulate.time_scale)
    from tiderl.agent.chat import load_chat_format

    return await asyncio.to_thread(load_chat_format, config.model.path, system_prompt=config.agent.system_prompt)


def vocab_size(config: Config) -> int:
    """Ids below it are tokens of the model."""
    if config.engine.kind == "emulated":
        from tiderl.engines.emulated_language import NUM_FILLERS

        return NUM_FILLERS
    size: int = json.loads((Path(config.model.path) / "config.json").read_text())["vocab_size"]
    return size
