"""`tiderl model tiny`: a language model small enough to train on two CPU cores, that plays an environment badly but not blindly.

It has the Qwen2 architecture (so that every backend takes the path that a real model takes), a tokenizer whose words are the
environment's, and weights that imitated an expert for a minute. The demonstrations are mostly *careless*, so that the model
has every skill that the task needs and uses it wrongly more often than not: reinforcement learning has something to mend,
and can mend it within minutes.

Invariants (tests/integration/test_tiny_model.py):

1. Same environment, seed and updates on the same machine: same weights. Work is counted in updates, never in seconds.
2. The folder is a complete Hugging Face model: config, safetensors, tokenizer, chat template, generation config; untied
   embeddings, float32, at least 2048 positions.
3. Every word that the environment says is one token, so that a turn generates an action word and an end of turn.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tiderl.agent.chat import ChatFormat
from tiderl.envs.protocol import Environment, EnvironmentClass, Observation, Started
from tiderl.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM

END, PAD = "<|end|>", "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
#: How often a demonstration walks on where it should turn; gives a success rate near one quarter, sampled at temperature 1.
BABYAI_WALK_ON_SHARE = 0.75
#: How often a demonstration buys where it should choose an option first.
SHOP_HASTE = 0.5
MAX_VOCAB = 4096
MAX_POSITIONS = 2048
#: Label of a token that carries no loss (torch's own default).
IGNORED = -100


class Expert(Protocol):
    """Plays one episode as an example."""

    def act(self, observation: str) -> str:
        """The action for the newest observation."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the model of one environment is made."""

    environment: EnvironmentClass
    #: The expert, somewhat careless, of a started episode.
    expert: Callable[[Environment, Started, random.Random], Expert]
    num_demonstrations: int
    hidden_size: int
    num_layers: int
    updates: int
    batch_size: int
    lr: float
    #: Whether actions repeat words of the instruction. Copying is slow to learn from actions alone: then pages, which repeat
    #: each other, carry loss too, and the output layer starts as the embeddings, so that to attend to a word is to say it.
    copies: bool = False


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One played episode: `actions[i]` answers `observations[i]`."""

    instruction: str
    observations: tuple[str, ...]
    actions: tuple[str, ...]

    def texts(self) -> Iterator[str]:
        yield self.instruction
        yield from self.observations
        yield from self.actions


def babyai_recipe() -> Recipe:
    """Knows the way, but walks on where it should turn more often than not."""
    from tiderl.envs.builtin.babyai import BabyAI
    from tiderl.envs.builtin.babyai_expert import BabyAIExpert

    def expert(environment: Environment, started: Started, rng: random.Random) -> Expert:
        del started
        assert isinstance(environment, BabyAI)
        return BabyAIExpert(environment, walk_on_share=BABYAI_WALK_ON_SHARE, rng=rng)

    return Recipe(
        BabyAI, expert, num_demonstrations=1000, hidden_size=160, num_layers=4, updates=60, batch_size=32, lr=1e-3
    )


def shop_recipe() -> Recipe:
    """Imitates an expert that leaves options unchosen half of the time.

    The model is weaker than that: it earns a mean reward of 0.33 on held-out tasks, but never yet 1.0, as it copies attributes
    only in part and hardly ever clicks the option asked for.
    """
    from tiderl.envs.builtin.shop import Shop
    from tiderl.envs.builtin.shop_expert import ShopExpert

    def expert(environment: Environment, started: Started, rng: random.Random) -> Expert:
        del environment
        return ShopExpert(started.instruction, haste=SHOP_HASTE, rng=rng)

    return Recipe(
        Shop,
        expert,
        num_demonstrations=1000,
        hidden_size=128,
        num_layers=2,
        updates=600,
        batch_size=3,
        lr=3e-3,
        copies=True,
    )


RECIPES: dict[str, Callable[[], Recipe]] = {"babyai": babyai_recipe, "shop": shop_recipe}


def demonstrate(recipe: Recipe, seed: int) -> list[Demonstration]:
    """Let the expert play training tasks."""
    rng = random.Random(seed)
    tasks = rng.sample(range(recipe.environment.num_tasks("train")), recipe.num_demonstrations)
    return [_play(recipe, task, rng) for task in tasks]


def _play(recipe: Recipe, task: int, rng: random.Random) -> Demonstration:
    environment = recipe.environment()
    started = environment.start("train", task, {})
    expert = recipe.expert(environment, started, rng)
    observations: list[str] = []
    actions: list[str] = []
    observation, done = started.observation.text, False
    while not done:
        observations.append(observation)
        actions.append(expert.act(observation))
        stepped = environment.step(actions[-1])
        observation, done = stepped.observation.text, stepped.done
    environment.close()
    return Demonstration(started.instruction, tuple(observations), tuple(actions))


def train_tokenizer(demonstrations: Sequence[Demonstration]) -> PreTrainedTokenizerBase:
    """Byte-level BPE that merges up to whole words of `demonstrations`; any other text still has its bytes."""
    from tokenizers import pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    # transformers gives a folder with Qwen2's config this class and its word splitting, whatever tokenizer was saved there;
    # another splitting would be replaced by Qwen2's when the folder is loaded, without a word.
    special = {"unk_token": END, "eos_token": END, "pad_token": PAD}
    pipeline = Qwen2Tokenizer(**special).backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=MAX_VOCAB,
        special_tokens=[END, PAD, *ROLES],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pipeline.train_from_iterator((text for shown in demonstrations for text in shown.texts()), trainer)
    trained = json.loads(pipeline.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=trained["vocab"],
        merges=[tuple(merge) for merge in trained["merges"]],
        additional_special_tokens=list(ROLES),
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
        **special,
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerBase, recipe: Recipe, seed: int) -> Qwen2ForCausalLM:
    """A fresh Qwen2 in float32. Heads of 32 are the smallest that vLLM's CPU attention takes."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden_size,
        intermediate_size=2 * recipe.hidden_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.hidden_size // 32,
        num_key_value_heads=recipe.hidden_size // 32,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.05 if recipe.copies else 0.02,
        dtype="float32",
    )
    model = Qwen2ForCausalLM(config)
    if recipe.copies:
        with torch.no_grad():
            model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    return model


def encode(chat: ChatFormat, tokenizer: PreTrainedTokenizerBase, shown: Demonstration) -> tuple[list[int], list[int]]:
    """`(token_ids, labels)` of a whole transcript, as rollout would record it; only the actions carry loss."""
    ids = chat.initial(shown.instruction, Observation(shown.observations[0]))
    labels = [IGNORED] * len(ids)
    for i, action in enumerate(shown.actions):
        generated = [*tokenizer(action, add_special_tokens=False)["input_ids"], chat.end_of_turn_id]
        ids += generated
        labels += generated
        if i + 1 < len(shown.actions):
            following = chat.next_turn(generated, Observation(shown.observations[i + 1]))
            ids += following
            labels += [IGNORED] * len(following)
    return ids, labels


def imitate(
    model: Qwen2ForCausalLM, examples: Sequence[tuple[list[int], list[int]]], recipe: Recipe, seed: int
) -> float:
    """Train on whole transcripts for `recipe.updates` updates; returns the last update's mean loss per action token."""
    import torch

    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: _lr_share(update, recipe.updates))
    order: list[int] = []
    loss_value = 0.0
    model.train()
    for _ in range(recipe.updates):
        if len(order) < recipe.batch_size:
            order = rng.sample(range(len(examples)), len(examples))
        batch = [examples[order.pop()] for _ in range(min(recipe.batch_size, len(examples)))]
        ids, labels = _pad([ids for ids, _ in batch], 0), _pad([labels for _, labels in batch], IGNORED)[:, 1:]
        # Padding stands at the end, where a causal model never looks, and logits are made for the few trained tokens only.
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        trained = labels != IGNORED
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[trained]), labels[trained])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        loss_value = loss.item()
    model.eval()
    return loss_value


def _lr_share(update: int, updates: int) -> float:
    """Share of the peak learning rate: up over the first tenth, down to nothing over the last half."""
    return min(1.0, (update + 1) / max(1.0, 0.1 * updates), 2 * (updates - update) / updates)


def _pad(rows: Sequence[Sequence[int]], value: int) -> torch.Tensor:
    """Rows of unequal length as one tensor [num_rows, longest], filled up with `value` at the end."""
    import torch

    longest = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (longest - len(row))] for row in rows])


def build(recipe: Recipe, folder: Path, *, seed: int, report: Callable[[str], Any] = print) -> None:
    """Make the model and write it to `folder`."""
    started_s = time.monotonic()
    demonstrations = demonstrate(recipe, seed)
    tokenizer = train_tokenizer(demonstrations)
    chat = ChatFormat(tokenizer)
    examples = [encode(chat, tokenizer, shown) for shown in demonstrations]
    if recipe.copies:
        examples = [(ids, ids) for ids, _ in examples]
    num_tokens = sum(len(ids) for ids, _ in examples)
    report(f"{len(examples)} demonstrations, {num_tokens} tokens, {time.monotonic() - started_s:.0f} s")
    model = make_model(tokenizer, recipe, seed)
    loss = imitate(model, examples, recipe, seed)
    model.generation_config.eos_token_id = list(chat.stop_token_ids)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    seconds = time.monotonic() - started_s
    report(f"{folder}: {num_parameters} parameters, vocabulary {len(tokenizer)}, loss {loss:.3f}, {seconds:.0f} s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `tiderl model tiny`."""
    parser.add_argument("--env", choices=sorted(RECIPES), required=True, help="environment that the model is made for")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write; it must not exist yet")
    parser.add_argument("--seed", type=int, default=0, help="seed of demonstrations and weights (default 0)")


def run(args: argparse.Namespace) -> int:
    """Make the model; returns the exit code. Raises `UserError` if the folder exists."""
    if args.out.exists():
        raise UserError(f"--out: {args.out} exists already; remove it or name another folder")
    build(RECIPES[args.env](), args.out, seed=args.seed)
    return 0
