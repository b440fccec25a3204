"""The quickstart's model: the numbered invariants of tiderl/agent/tiny_model.py, and that it is neither hopeless nor good."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tiderl.agent import tiny_model
from tiderl.agent.chat import ChatFormat
from tiderl.envs.builtin.babyai import BabyAI
from tiderl.errors import UserError

pytest.importorskip("minigrid")
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

NUM_TASKS = 100


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as the quickstart makes it."""
    parser = argparse.ArgumentParser()
    tiny_model.add_arguments(parser)
    out = tmp_path_factory.mktemp("models") / "tiny-babyai"
    assert tiny_model.run(parser.parse_args(["--env", "babyai", "--out", str(out)])) == 0
    return out


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


def test_the_folder_is_a_whole_model(folder: Path, tokenizer: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "qwen2"
    assert config["dtype"] == "float32"
    assert config["tie_word_embeddings"] is False
    assert config["max_position_embeddings"] >= 2048
    assert config["vocab_size"] == len(tokenizer)
    # The heads that vLLM's CPU attention has kernels for.
    assert config["hidden_size"] // config["num_attention_heads"] in (32, 64, 128)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1_500_000
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    assert model.generation_config.eos_token_id == list(ChatFormat(tokenizer).stop_token_ids)
    assert {"model.safetensors", "generation_config.json", "tokenizer.json"} <= {file.name for file in folder.iterdir()}


def test_a_word_is_a_token(tokenizer: Any) -> None:
    chat = ChatFormat(tokenizer)
    environment = BabyAI()
    for seed in range(20):
        started = environment.start("test", seed, {})
        text = started.observation.text
        # Every full stop is a token too, and so are the role, the end of turn and the role that is to answer.
        expected = len(text.split()) + text.count(".") + 3
        assert len(chat.next_turn([chat.end_of_turn_id], started.observation)) == expected
    for action in environment.actions:
        assert len(tokenizer(action)["input_ids"]) == 1
        assert chat.action_text([*tokenizer(action)["input_ids"], chat.end_of_turn_id]) == action


def test_text_that_was_never_seen_survives(tokenizer: Any) -> None:
    text = "Zwölf  Boxkämpfer,\n\t£3 — 日本 <|end"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_only_actions_and_their_ends_carry_loss(tokenizer: Any) -> None:
    chat = ChatFormat(tokenizer)
    shown = tiny_model.Demonstration("Walk.", ("front empty.", "front wall."), ("forward", "left"))
    ids, labels = tiny_model.encode(chat, tokenizer, shown)
    forward, left = (tokenizer(word)["input_ids"][0] for word in ("forward", "left"))
    assert [label for label in labels if label != tiny_model.IGNORED] == [
        forward,
        chat.end_of_turn_id,
        left,
        chat.end_of_turn_id,
    ]
    assert all(label in (token, tiny_model.IGNORED) for token, label in zip(ids, labels, strict=True))
    messages = [
        {"role": role, "content": content}
        for role, content in [
            ("system", "Walk."),
            ("user", "front empty."),
            ("assistant", "forward"),
            ("user", "front wall."),
            ("assistant", "left"),
        ]
    ]
    assert ids == tokenizer(tokenizer.apply_chat_template(messages, tokenize=False))["input_ids"]


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path: Path) -> None:
    recipe = dataclasses.replace(tiny_model.RECIPES["babyai"](), num_demonstrations=20, updates=3)
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        tiny_model.build(recipe, tmp_path / name, seed=seed, report=str)
    weights = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in "abc"}
    assert weights["a"] == weights["b"]
    assert weights["a"] != weights["c"]


def test_the_shops_model_learns_its_pages_too_and_starts_by_repeating(tmp_path: Path) -> None:
    recipe = dataclasses.replace(tiny_model.RECIPES["shop"](), num_demonstrations=10, updates=2)
    tiny_model.build(recipe, tmp_path / "shop", seed=0, report=str)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "shop")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "shop")
    assert len(tokenizer) == model.config.vocab_size
    fresh = tiny_model.make_model(tokenizer, recipe, seed=0)
    start = fresh.lm_head.weight
    assert torch.equal(start, fresh.model.embed_tokens.weight)
    assert start.data_ptr() != fresh.model.embed_tokens.weight.data_ptr(), "equal at the start, but not tied"
    assert not torch.equal(model.lm_head.weight, start)
    # No action says what the search page says: it is expected more than at the start only because pages carry loss.
    ids = torch.tensor([tokenizer("<|user|>Search page. Use search[keywords].")["input_ids"]])
    with torch.no_grad():
        assert model(ids, labels=ids).loss < fresh(ids, labels=ids).loss


def test_a_folder_that_exists_is_left_alone(tmp_path: Path) -> None:
    arguments = argparse.Namespace(env="babyai", out=tmp_path, seed=0)
    with pytest.raises(UserError, match="exists already"):
        tiny_model.run(arguments)
    assert list(tmp_path.iterdir()) == []


@torch.no_grad()
def success_rate(folder: Path, tokenizer: Any, temperature: float) -> float:
    """Play held-out tasks side by side, with one cache whose padding is masked out."""
    chat = ChatFormat(tokenizer)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    environments = [BabyAI() for _ in range(NUM_TASKS)]
    started = [environment.start("test", seed, {}) for seed, environment in enumerate(environments)]
    pending = [chat.initial(each.instruction, each.observation) for each in started]
    cache, mask = transformers.DynamicCache(), torch.zeros(NUM_TASKS, 0, dtype=torch.long)
    done, num_solved = [False] * NUM_TASKS, 0
    while not all(done):
        longest = max(map(len, pending))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in pending])
        mask = torch.cat([mask, torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in pending])], dim=1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -longest:]
        logits = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits[:, -1]
        if temperature == 0:
            chosen = logits.argmax(-1).tolist()
        else:
            chosen = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0].tolist()
        for i, token in enumerate(chosen):
            if done[i]:
                continue
            # What comes after the action word is not sampled: the model has learned to end its turn there.
            stepped = environments[i].step(chat.action_text([token]))
            pending[i] = [token, *chat.next_turn([token], stepped.observation)]
            done[i] = stepped.done
            num_solved += stepped.success
    return num_solved / NUM_TASKS


def test_it_plays_badly_but_not_blindly(folder: Path, tokenizer: Any) -> None:
    # A random policy solves 0.1; on 100 tasks the rate has a standard error of 0.05.
    assert 0.15 < success_rate(folder, tokenizer, temperature=1.0) < 0.5
    # It walks on where it should turn: only what stands straight ahead is ever reached.
    assert success_rate(folder, tokenizer, temperature=0.0) < 0.5
