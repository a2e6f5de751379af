"""A user's prompts: a file of text or JSON lines to token ids."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

KINDS = ("input_ids", "text", "messages")
"""What a JSON line may hold, of which it holds exactly one."""


def read(path: Path, model: Path) -> list[list[int]]:
    """Token ids of every prompt in `path`, by the tokenizer of the checkpoint in `model` where a prompt is text.

    A .jsonl file has an object a line: {"text": ...}, {"messages": [...]} for the tokenizer's chat template, or
    {"input_ids": [...]}. In any other file each line that is not empty is a prompt.

    Raises:
        SystemExit: the file or a line of it is not that; the sentence says which and what to change.
    """
    try:
        lines = [(number, line) for number, line in enumerate(path.read_text().splitlines(), 1) if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"--prompts {path} is no text that can be read ({error}): pass a file of UTF-8 text") from error
    if not lines:
        raise SystemExit(f"--prompts {path} has no prompt: write one a line")
    known = Tokenizer(model)
    if path.suffix == ".jsonl":
        return [_ids(line, f"{path}, line {number}", known) for number, line in lines]
    return [known.of_text(line) for _, line in lines]


class Tokenizer:
    """The checkpoint's tokenizer, loaded when the first prompt asks for it."""

    def __init__(self, model: Path):
        self._model, self._loaded = model, None

    def _tokenizer(self) -> Any:
        if self._loaded is None:
            from transformers import AutoTokenizer

            try:
                self._loaded = AutoTokenizer.from_pretrained(str(self._model))
            except (OSError, ValueError, ImportError) as error:
                why = str(error).splitlines()[0]
                raise SystemExit(f'{self._model} has no tokenizer ({why}): pass prompts as {{"input_ids": [...]}}') from error
        return self._loaded

    def of_text(self, text: str) -> list[int]:
        return list(self._tokenizer()(text)["input_ids"])

    def of_messages(self, messages: list[dict]) -> list[int]:
        tokenizer = self._tokenizer()
        if not tokenizer.chat_template:
            raise SystemExit(f'the tokenizer of {self._model} has no chat template: pass prompts as {{"text": ...}} instead')
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False))


def _ids(line: str, where: str, tokenizer: Tokenizer) -> list[int]:
    try:
        found = json.loads(line)
    except json.JSONDecodeError as error:
        raise SystemExit(f"{where} is no JSON ({error}): write one object a line, or name the file .txt") from error
    kinds = [kind for kind in KINDS if kind in found] if isinstance(found, dict) else []
    if len(kinds) != 1:
        raise SystemExit(f"{where} must be an object with exactly one of {', '.join(KINDS)}")
    read_as: dict[str, Callable] = {"input_ids": list, "text": tokenizer.of_text, "messages": tokenizer.of_messages}
    ids = read_as[kinds[0]](found[kinds[0]])
    if not ids or not all(isinstance(token, int) for token in ids):
        raise SystemExit(f"{where} gives no token ids: {kinds[0]} must not be empty, and input_ids must be whole numbers")
    return ids
