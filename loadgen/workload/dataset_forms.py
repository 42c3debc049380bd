"""Prompts in a record of a dataset, whatever tool wrote it.

Sources: the OpenAI batch API; chat messages as in the OpenAI API; ShareGPT; WildChat and
LMSYS-Chat-1M (`conversation`); MT-Bench (`turns`); vLLM's custom data set; evalscope (`question`);
Alpaca (`instruction`, `input`); SQuAD, LongBench and Dolly (a text `context` before the question).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loadgen.errors import ScenarioError, nearest
from loadgen.manifest.json_section import JsonObject
from loadgen.workload.lengths import MAX_TOKENS
from loadgen.workload.traces.synonyms import SYNONYMS, column_words

Messages = tuple[tuple[str, str], ...]  # (role, content)

_ROLES = {"human": "user", "user": "user", "prompter": "user", "system": "system"}
_ROLES |= {"developer": "developer"}
_ROLES |= dict.fromkeys(
    ("gpt", "chatgpt", "assistant", "bard", "bing", "model", "bot", "output"), "assistant"
)
_SYSTEM = ("system", "developer")
_TEXT_KEYS = ("prompt", "question", "instruction", "query", "input", "text", "problem", "prompts")
_MESSAGE_KEYS = ("messages", "chat", "message")
_TURN_KEYS = ("conversations", "conversation", "dialog", "dialogue", "turns")
_SYSTEM_KEYS = ("system", "system_prompt")
_ANSWER_KEYS = ("completion", "response", "output", "chosen")
_COUNT_KEYS = (
    *("output_tokens", "max_tokens", "max_completion_tokens", "max_output_tokens"),
    *(name for name in SYNONYMS["output_tokens"] if name != "output_tokens"),
    "expected_output_len",
)
_IN_MESSAGES = (
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "function_call",
    "refusal",
    "audio",
    "reasoning_content",
)
_OF_RUN = (
    "model",
    "messages",
    "prompt",
    "input",
    "stream",
    "stream_options",
    "temperature",
    "seed",
    "n",
    *_COUNT_KEYS,
)
"""Fields of a body that slobench sets itself."""
_IN_RECORD = ("tools", "tool_choice", "parallel_tool_calls", "functions", "response_format")
"""Fields of a body that a record of messages may hold beside them."""
_BATCH_PATHS = ("/chat/completions", "/completions")
FORMATS = ("auto", "openai_batch", "messages", "conversations", "prompt", "lines")
"""The forms of a record. `lines`: each line of the file is a prompt."""
EXPECTED = (
    "prompt or question (text), messages (a list of {role, content}), conversations (a list of "
    "{from, value} or {role, content}), or body (OpenAI batch)"
)


class LeftOut(ValueError):
    """A record that cannot be a request; the message is the reason, without the record's
    content."""


@dataclass(frozen=True, slots=True)
class RecordedPrompt:
    """A prompt of a dataset.

    `messages` are its texts. `fields` are the fields of the request's body that are sent as
    recorded; its `messages`, with tool calls or typed parts, replace the texts. `output_tokens` is
    the length of the answer if the record states it; `answer` is a recorded answer, which is not
    sent, and whose length counts where no number is stated. `place` is `file:line`.
    """

    messages: Messages
    output_tokens: int | None = None
    answer: str = ""
    fields: JsonObject = field(default_factory=dict, hash=False)
    place: str = ""

    @property
    def needs_chat(self) -> bool:
        """Whether only the chat API can carry it."""
        return "messages" in self.fields or "tools" in self.fields


def read_prompts(
    record: Any, place: str, form: str = "auto", *, needs_answer: bool = False
) -> list[RecordedPrompt]:
    """The prompts of a record in a form of FORMATS. `needs_answer`: a conversation without an
    answer to its first question is left out.

    Raises LeftOut for a record without a prompt, ScenarioError with `place` for a value of a wrong
    type.
    """
    if isinstance(record, str):
        return [RecordedPrompt((("user", _filled(record)),), place=place)]
    if isinstance(record, list):
        record = {"conversations": record}
    if not isinstance(record, dict):
        raise LeftOut(f"no object but {_kind(record)}")
    by_word = {column_words(str(key)): key for key in record}
    values = {word: _decoded(record[key]) for word, key in by_word.items()}
    chosen = _form(values) if form == "auto" else form
    if chosen == "openai_batch":
        return [_batch(values, place)]
    if chosen == "messages":
        return [_chat(values, _first(values, _MESSAGE_KEYS), values, _IN_RECORD, place)]
    if chosen == "conversations":
        turns = _first(values, _TURN_KEYS)
        return [_conversation(values, turns, place, needs_answer)]
    return _texts(values, place)


def keys_found(record: Any) -> str:
    """The keys of a record, for a message."""
    if not isinstance(record, dict):
        return f"{_kind(record)}"
    return ", ".join(str(key) for key in record)[:200] or "no keys"


def nearest_form(record: Any) -> str:
    """The expected keys, with the nearest to the record's."""
    known = (*_TEXT_KEYS, *_MESSAGE_KEYS, *_TURN_KEYS, "body")
    for key in record if isinstance(record, dict) else ():
        hint = nearest(column_words(str(key)), known)
        if hint.startswith("did you mean"):
            return f"expected {EXPECTED}; {hint.partition('?')[0]}?"
    return f"expected {EXPECTED}"


def _form(values: Mapping[str, Any]) -> str:
    if isinstance(values.get("body"), dict):
        return "openai_batch"
    for form, keys in (
        ("messages", _MESSAGE_KEYS),
        ("conversations", _TURN_KEYS),
        ("prompt", _TEXT_KEYS),
    ):
        if any(values.get(key) for key in keys) or (
            form == "prompt" and any(values.get(key) is not None for key in keys)
        ):
            return form
    raise LeftOut("no prompt")


def _first(values: Mapping[str, Any], keys: Sequence[str]) -> Any:
    return next((values[key] for key in keys if values.get(key) is not None), None)


def _batch(values: Mapping[str, Any], place: str) -> RecordedPrompt:
    """A line of the OpenAI batch API: {custom_id, method, url, body}."""
    url = values.get("url")
    if isinstance(url, str) and not url.rstrip("/").endswith(_BATCH_PATHS):
        raise LeftOut(f"a batch request to {url[:60]!r}, not to chat/completions or completions")
    body = values.get("body")
    if not isinstance(body, dict):
        raise LeftOut("no body")
    kept = tuple(key for key in body if key not in _OF_RUN)
    if body.get("messages") is not None:
        return _chat(body, body["messages"], body, kept, place)
    prompts = _texts(body, place)
    if len(prompts) != 1:
        raise LeftOut("a list of prompts in a batch request")
    fields = {key: body[key] for key in kept}
    prompt = prompts[0]
    return RecordedPrompt(
        prompt.messages, prompt.output_tokens, prompt.answer, {**prompt.fields, **fields}, place
    )


def _chat(
    values: Mapping[str, Any],
    messages: Any,
    body: Mapping[str, Any],
    kept: Sequence[str],
    place: str,
) -> RecordedPrompt:
    """Messages of the chat API. A last answer is not sent."""
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise LeftOut("messages that are no list of {role, content}")
    sent: list[JsonObject] = []
    for message in messages:
        if not isinstance(message.get("role"), str):
            if _role_of(message):
                return _conversation(values, messages, place, needs_answer=False)
            raise LeftOut("a message without a role")
        sent.append(
            {
                key: message.get(key)
                for key in _IN_MESSAGES
                if key == "content" or message.get(key) is not None
            }
        )
    answer = ""
    while sent and sent[-1]["role"] == "assistant":
        answer = _text_of(sent.pop())
    texts = tuple((str(message["role"]), _text_of(message)) for message in sent)
    if not any(role not in _SYSTEM for role, _ in texts):
        raise LeftOut("no question")
    if not (texts[-1][1].strip() or isinstance(sent[-1]["content"], list)):
        raise LeftOut("an empty prompt")
    is_plain = all({*m} == {"role", "content"} and isinstance(m["content"], str) for m in sent)
    fields = {key: body[key] for key in kept if body.get(key) is not None}
    if not is_plain:
        fields["messages"] = sent
    return RecordedPrompt(texts, _output_tokens(values, place), answer, fields, place)


def _conversation(
    values: Mapping[str, Any], turns: Any, place: str, needs_answer: bool
) -> RecordedPrompt:
    """The first question of a conversation, after its leading system turns, and the answer to
    it."""
    if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
        turns = [{"role": "user", "content": turns[0]}]  # MT-Bench: the questions alone
    if not isinstance(turns, list) or not turns:
        raise LeftOut("no turns")
    pairs = [_turn(turn) for turn in turns]
    n_system = next((k for k, (role, _) in enumerate(pairs) if role not in _SYSTEM), len(pairs))
    system = [pair for pair in pairs[:n_system] if pair[1]]
    rest = pairs[n_system:]
    if not rest or rest[0][0] != "user":
        raise LeftOut("no question at its start")
    if not rest[0][1]:
        raise LeftOut("an empty prompt")
    answer = rest[1][1] if len(rest) > 1 and rest[1][0] == "assistant" else ""
    if needs_answer and not answer:
        raise LeftOut("no answer to its question")
    messages = (*(system or _system(values)), rest[0])
    return RecordedPrompt(messages, _output_tokens(values, place), answer, {}, place)


def _role_of(turn: Any) -> str:
    if not isinstance(turn, dict):
        return ""
    stated = turn.get("role", turn.get("from", turn.get("speaker", turn.get("author"))))
    return _ROLES.get(str(stated).lower(), "")


def _turn(turn: Any) -> tuple[str, str]:
    """(role, text) of a turn; the text is empty if there is none but white space."""
    if not isinstance(turn, dict):
        return "", ""
    text = turn.get("content", turn.get("value", turn.get("text")))
    return _role_of(turn), text if isinstance(text, str) and text.strip() else ""


def _texts(values: Mapping[str, Any], place: str) -> list[RecordedPrompt]:
    """The prompts of a record of texts. A list of texts holds a prompt each."""
    prompt = _first(values, _TEXT_KEYS)
    if isinstance(prompt, str) and "instruction" in values and isinstance(values.get("input"), str):
        prompt = f"{values['instruction']}\n\n{values['input']}".strip()
    passage = values.get("context")
    if isinstance(prompt, str) and prompt.strip() and isinstance(passage, str) and passage.strip():
        prompt = f"{passage}\n\n{prompt}"
    if isinstance(prompt, list) and prompt and all(isinstance(part, dict) for part in prompt):
        return [_chat(values, prompt, values, _IN_RECORD, place)]
    prompts = prompt if isinstance(prompt, list) else [prompt]
    if not prompts:
        raise LeftOut("an empty prompt")
    if any(isinstance(part, int | list) for part in prompts):
        raise LeftOut("a prompt of token ids, not of text")
    if not all(isinstance(part, str) for part in prompts):
        raise LeftOut("a prompt that is no text")
    answer = next((v for key in _ANSWER_KEYS if isinstance(v := values.get(key), str)), "")
    n_tokens, system = _output_tokens(values, place), _system(values)
    return [
        RecordedPrompt(
            (*system, ("user", _filled(part))),
            n_tokens,
            answer if len(prompts) == 1 else "",
            {},
            place,
        )
        for part in prompts
    ]


def _system(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    text = _first(values, _SYSTEM_KEYS)
    return [("system", text)] if isinstance(text, str) and text.strip() else []


def _filled(text: str) -> str:
    if not text.strip():
        raise LeftOut("an empty prompt")
    return text


def _output_tokens(values: Mapping[str, Any], place: str) -> int | None:
    """The stated length of the answer; None if the record states none."""
    key = next((key for key in _COUNT_KEYS if values.get(key) is not None), None)
    if key is None:
        return None
    value = values[key]
    if isinstance(value, str) and re.fullmatch(r"\s*\d+(\.0*)?\s*", value):
        value = float(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MAX_TOKENS or value != int(value):
        raise ScenarioError(
            f"{place}: {key}: expected a whole number of tokens, got {str(value)[:40]!r}"
        )
    if value == 0:
        raise LeftOut("an answer of 0 tokens")
    return int(value)


def _text_of(message: Mapping[str, Any]) -> str:
    """The text of a message, of its typed parts and of its tool calls."""
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    if calls := message.get("tool_calls") or message.get("function_call"):
        texts.append(json.dumps(calls, ensure_ascii=False))
    return " ".join(text for text in texts if isinstance(text, str) and text)


def _decoded(value: Any) -> Any:
    """The list or object in a cell of text, as CSV files hold them; any other value unchanged."""
    if isinstance(value, str) and value.lstrip()[:2] in ("[{", '["', '{"'):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _kind(value: Any) -> str:
    return {list: "a list", str: "a text", bool: "true or false", type(None): "null"}.get(
        type(value), "a number"
    )
