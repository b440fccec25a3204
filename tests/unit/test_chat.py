"""Chat templates: the numbered invariants of tiderl/agent/chat.py on the templates of three model families."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers")

from tiderl.agent.chat import ChatFormat
from tiderl.envs.protocol import ImagePart, Observation
from tiderl.errors import ModelError

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")

CHATML = (
    "{%- if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
LLAMA3 = (
    "{%- for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
    "+ message['content'] | trim + '<|eot_id|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"
)
#: As Qwen3 does: reasoning is kept in the newest assistant message only.
QWEN3 = (
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' + message['content'] }}"
    "{%- elif message['role'] == 'assistant' %}{{ message['content'].split('</think>')[-1].lstrip('\n') }}"
    "{%- else %}{{ message['content'] }}{%- endif %}{{ '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "qwen3": QWEN3}


def make_tokenizer(template: str | None, eos_token: str | None = "<|endoftext|>") -> Any:
    """Bytes as tokens, so that tokenization is concatenative and every text has one right answer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos_token, clean_up_tokenization_spaces=False)
    fast.chat_template = template
    return fast


TOKENIZERS = {name: make_tokenizer(template) for name, template in TEMPLATES.items()}
#: Words without white space around them: what a template trims is the template's business, not this test's.
texts = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12).filter(
    lambda text: text == text.strip() and "<" not in text
)


def ids_of(name: str, text: str) -> list[int]:
    return list(TOKENIZERS[name](text, add_special_tokens=False)["input_ids"])


def rendered(name: str, messages: list[dict[str, str]]) -> list[int]:
    text = TOKENIZERS[name].apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return ids_of(name, text)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("ended", [True, False])
@given(instruction=texts, observations=st.lists(texts, min_size=2, max_size=4), answer=texts)
def test_a_grown_prompt_is_the_rendered_conversation(
    name: str, ended: bool, instruction: str, observations: list[str], answer: str
) -> None:
    chat = ChatFormat(TOKENIZERS[name])
    messages = [{"role": "system", "content": instruction}, {"role": "user", "content": observations[0]}]
    ids = chat.initial(instruction, Observation(observations[0]))
    assert ids == rendered(name, messages)
    for observation in observations[1:]:
        generated = ids_of(name, answer) + ([chat.end_of_turn_id] if ended else [])
        ids = ids + generated + chat.next_turn(generated, Observation(observation))
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": observation}]
        assert ids == rendered(name, messages)


def test_a_template_that_drops_reasoning_drops_none_of_the_recorded_ids() -> None:
    chat = ChatFormat(TOKENIZERS["qwen3"])
    generated = [*ids_of("qwen3", "<think>\nhm\n</think>\n\nleft"), chat.end_of_turn_id]
    following = chat.next_turn(generated, Observation("wall"))
    assert following == ids_of("qwen3", "\n<|im_start|>user\nwall<|im_end|>\n<|im_start|>assistant\n")
    assert chat.action_text(generated) == "left"


def test_without_a_system_message_the_instruction_heads_the_first_observation() -> None:
    chat = ChatFormat(TOKENIZERS["llama3"], system_prompt=False)
    assert chat.initial("Walk.", Observation("wall")) == rendered(
        "llama3", [{"role": "user", "content": "Walk.\n\nwall"}]
    )


@pytest.mark.parametrize(
    ("name", "stops"), [("chatml", ("<|im_end|>", "<|endoftext|>")), ("llama3", ("<|eot_id|>", "<|endoftext|>"))]
)
def test_a_generation_stops_at_the_end_of_turn_and_at_eos(name: str, stops: tuple[str, str]) -> None:
    tokenizer = TOKENIZERS[name]
    assert ChatFormat(tokenizer).stop_token_ids == tuple(tokenizer.convert_tokens_to_ids(list(stops)))
    assert ChatFormat(make_tokenizer(TEMPLATES[name], stops[0])).stop_token_ids == (
        tokenizer.convert_tokens_to_ids(stops[0]),
    )
    assert ChatFormat(make_tokenizer(TEMPLATES[name], None)).stop_token_ids == (
        tokenizer.convert_tokens_to_ids(stops[0]),
    )


def test_a_generation_that_ended_with_eos_still_gets_its_end_of_turn() -> None:
    chat = ChatFormat(TOKENIZERS["chatml"])
    end_of_turn, eos = chat.stop_token_ids
    assert chat.next_turn([65, eos], Observation("x"))[0] == end_of_turn
    assert chat.next_turn([65, end_of_turn], Observation("x"))[0] != end_of_turn
    assert chat.next_turn([], Observation("x"))[0] == end_of_turn


def test_the_action_is_the_text_without_special_tokens_and_white_space() -> None:
    chat = ChatFormat(TOKENIZERS["chatml"])
    assert chat.action_text([*ids_of("chatml", " go\tleft \n"), *chat.stop_token_ids]) == "go\tleft"
    assert chat.action_text(ids_of("chatml", "<think> never closed")) == "<think> never closed"
    assert chat.action_text([]) == ""


def test_images_are_refused_by_name() -> None:
    chat = ChatFormat(TOKENIZERS["chatml"])
    shown = Observation("x", (ImagePart(b"", "image/png"),))
    with pytest.raises(ModelError, match="images, which are not supported by this chat format yet"):
        chat.initial("i", shown)
    with pytest.raises(ModelError, match="images"):
        chat.next_turn([], shown)


NUMBERED = (
    "{%- for message in messages %}<|im_start|>{{ message['role'] }} {{ loop.index }}\n{{ message['content'] }}<|im_end|>"
    "{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)
LAST_ONLY = "<|im_start|>{{ messages[-1]['content'] }}<|im_end|>{%- if add_generation_prompt %}<|im_start|>{%- endif %}"
NO_SYSTEM = (
    "{%- if messages[0]['role'] == 'system' %}{{ raise_exception('system role not supported') }}{%- endif %}" + CHATML
)
FIRST_PROMPT_DIFFERS = (
    "{%- for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>{{ 'first' if messages | length < 3 else 'later' }}{%- endif %}"
)


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        (None, "has no chat template"),
        (CHATML.partition("{%- if add_generation_prompt")[0], "adds no generation prompt"),
        (NUMBERED, "renders the next message differently"),
        (LAST_ONLY, "leaves out what the assistant said"),
        (NO_SYSTEM, "system role not supported; set agent.system_prompt = false"),
        (FIRST_PROMPT_DIFFERS, "starts the assistant's first and later turns differently"),
        (CHATML.replace("<|im_end|>", ""), "without a special token"),
    ],
)
def test_a_template_whose_prompts_cannot_grow_is_refused(template: str | None, problem: str) -> None:
    with pytest.raises(ModelError, match=problem):
        ChatFormat(make_tokenizer(template))


def test_a_template_without_a_system_role_works_without_a_system_message() -> None:
    chat = ChatFormat(make_tokenizer(NO_SYSTEM), system_prompt=False)
    assert chat.action_text(ids_of("chatml", "left")) == "left"
