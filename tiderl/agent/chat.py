"""From messages to token ids and back, for any Hugging Face chat template: token in, token out.

A trajectory is a list of ids that only ever grows. The first prompt is the rendered template; after each generation come the
ids that close the assistant's turn and open the next. Those are found once a turn, as text: the template is rendered with a
probe in the assistant's place and the new observation behind it, and what follows the probe is tokenized. Nothing that was
generated is ever decoded and tokenized again, and a template that rewrites earlier turns (Qwen3 drops reasoning) rewrites
nothing here: the recorded ids stand.

Invariants (tests/unit/test_chat.py):

1. For a template that leaves earlier turns alone, `initial` + generated + `next_turn` is the tokenized rendering of the
   whole conversation, whether the generation ended with the end-of-turn token or was cut before it.
2. `next_turn` never repeats or changes an id that was generated.
3. A template whose next message depends on how long the conversation is, or that marks no end of a turn with one special
   token, is refused when the format is made.

Images: `Observation.images` is refused for now; their placeholders belong into `initial` and `next_turn`.

Source: paper §2.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tiderl.envs.protocol import Observation
from tiderl.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Stands for the assistant's text; not a word that a template could contain, and free of white space that one could trim.
PROBE = "TIDERL-ASSISTANT-TURN"
END_OF_REASONING = "</think>"

Message = dict[str, str]


class ChatFormat:
    """The prompts of one tokenizer's chat template.

    With `system_prompt` the environment's instruction is a system message; without, it heads the first user message.
    Raises `ModelError` if the template cannot give prompts that only grow.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, system_prompt: bool = True) -> None:
        self._tokenizer = tokenizer
        self._system_prompt = system_prompt
        if not getattr(tokenizer, "chat_template", None):
            raise self._error("has no chat template; use an instruction-tuned model or add chat_template.jinja")
        self.end_of_turn_id = self._check_template()
        eos_id = tokenizer.eos_token_id
        stops = (self.end_of_turn_id,) if eos_id is None else (self.end_of_turn_id, int(eos_id))
        #: Ids that end a generation, the template's end of turn first.
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys(stops))

    def initial(self, instruction: str, observation: Observation) -> list[int]:
        """The first prompt, up to where the assistant's text starts. Raises `ModelError` for images."""
        return self._tokenize(self._render(self._opening(instruction, self._text_of(observation)), prompt=True))

    def next_turn(self, generated_ids: Sequence[int], observation: Observation) -> list[int]:
        """The ids to append after `generated_ids`: the end of that turn where it is missing, `observation`, the prompt.

        Raises `ModelError` for images.
        """
        ids = self._tokenize(self._delta(self._text_of(observation), num_earlier_turns=0))
        if len(generated_ids) > 0 and generated_ids[-1] == self.end_of_turn_id:
            return ids[1:]
        return ids

    def action_text(self, generated_ids: Sequence[int]) -> str:
        """What the environment gets: the text without special tokens, reasoning and surrounding white space."""
        text = self._tokenizer.decode(list(generated_ids), skip_special_tokens=True)
        return str(text).rpartition(END_OF_REASONING)[2].strip()

    def _opening(self, instruction: str, observation: str) -> list[Message]:
        if self._system_prompt:
            return [{"role": "system", "content": instruction}, {"role": "user", "content": observation}]
        return [{"role": "user", "content": f"{instruction}\n\n{observation}"}]

    def _delta(self, observation: str, *, num_earlier_turns: int) -> str:
        """What the template puts behind the assistant's text when `observation` is the next message."""
        messages = self._opening("i", "o")
        for _ in range(num_earlier_turns):
            messages += [{"role": "assistant", "content": "a"}, {"role": "user", "content": "o"}]
        messages += [{"role": "assistant", "content": PROBE}, {"role": "user", "content": observation}]
        _, found, delta = self._render(messages, prompt=True).partition(PROBE)
        if not found:
            raise self._error("leaves out what the assistant said; TideRL needs it in the conversation")
        return delta

    def _check_template(self) -> int:
        """The id that ends an assistant's turn. Raises `ModelError` for a template whose prompts cannot grow."""
        opening = self._opening("i", "o")
        without, with_prompt = self._render(opening, prompt=False), self._render(opening, prompt=True)
        generation_prompt = with_prompt.removeprefix(without)
        if generation_prompt in (with_prompt, ""):
            raise self._error("adds no generation prompt; it must heed add_generation_prompt")
        delta = self._delta("o", num_earlier_turns=0)
        if delta != self._delta("o", num_earlier_turns=1):
            raise self._error(
                "renders the next message differently as the conversation grows; prompts could not be extended"
            )
        if not delta.endswith(generation_prompt):
            raise self._error("starts the assistant's first and later turns differently; prompts could not be extended")
        end_of_turn = self._tokenize(delta)[0]
        if end_of_turn not in self._tokenizer.added_tokens_decoder:
            raise self._error(
                "ends the assistant's turn without a special token, so a generation would not know its end"
            )
        return end_of_turn

    def _render(self, messages: list[Message], *, prompt: bool) -> str:
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        except TemplateError as error:
            hint = "; set agent.system_prompt = false if it knows no system message" if self._system_prompt else ""
            raise self._error(f"cannot render a conversation with an environment: {error}{hint}") from error
        return str(text)

    def _tokenize(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    def _text_of(self, observation: Observation) -> str:
        if observation.images:
            raise self._error("got an observation with images, which are not supported by this chat format yet")
        return observation.text

    def _error(self, problem: str) -> ModelError:
        return ModelError(f"the chat template of {self._tokenizer.name_or_path or 'this tokenizer'} {problem}")


def load_chat_format(model_path: str, *, system_prompt: bool = True) -> ChatFormat:
    """The chat format of a model folder's tokenizer. Raises `ModelError` where it has none that can be used."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model_path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path: {model_path} has no tokenizer that transformers can load: {error}") from error
    return ChatFormat(tokenizer, system_prompt=system_prompt)
