"""How one model's dialogs look as token ids: what opens a user turn, and what stands between turns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2.sandbox
import tokenizers

from graftline.engine.models.card import ModelCardData
from graftline.errors import InvalidRequestError

_USER_MARK = "\ue000user\ue000"
_REPLY_MARK = "\ue000reply\ue000"


@dataclass(frozen=True, slots=True)
class DialogFormat:
    """Token ids between the turns of a dialog.

    Attributes:
        user_to_answer: from the end of a user turn to the first token of the answer; its first id ends a user turn.
        answer_to_user: from the end of an answer to the first token of the next user turn.
        end_ids: tokens that end an answer when the model draws them.
    """

    user_to_answer: tuple[int, ...]
    answer_to_user: tuple[int, ...]
    end_ids: tuple[int, ...]

    @property
    def always_kept(self) -> tuple[int, ...]:
        """Ids that every draft vocabulary should hold."""
        return tuple(sorted({*self.user_to_answer, *self.answer_to_user, *self.end_ids}))


class DialogWriter:
    """Turns messages into token ids with a model's own template and tokenizer.

    Raises:
        InvalidRequestError: the model has no chat template, or one that does not keep messages whole.
    """

    def __init__(self, card: ModelCardData) -> None:
        if not card.chat_template:
            raise InvalidRequestError("model", f"{card.model_id} has no chat template to write dialogs with")
        self._tokenizer = tokenizers.Tokenizer.from_str(card.tokenizer_json.decode())
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = environment.from_string(card.chat_template)
        self._specials = dict(card.special_tokens)
        self.format = self._dialog_format(card.eos_token_ids)

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text; special tokens are recognised, none are added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens included."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def prompt_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Ids of a dialog up to the place where the answer begins."""
        return self.encode(self._render(messages, prompt=True))

    def open_user_turn_ids(self, system: str, start: str) -> list[int]:
        """Ids up to and including `start`, the first words of a user turn that the model is to finish.

        Args:
            system: content of a system message; empty for whatever the template puts there by itself.
        """
        messages = [{"role": "system", "content": system}] if system else []
        text = self._render([*messages, {"role": "user", "content": _USER_MARK}], prompt=False)
        return self.encode(text.split(_USER_MARK)[0] + start.rstrip(" "))

    def _render(self, messages: Sequence[Mapping[str, Any]], *, prompt: bool) -> str:
        return self._template.render(messages=messages, add_generation_prompt=prompt, **self._specials)

    def _dialog_format(self, end_ids: tuple[int, ...]) -> DialogFormat:
        user, reply = {"role": "user", "content": _USER_MARK}, {"role": "assistant", "content": _REPLY_MARK}
        opened = self._render([user], prompt=True).split(_USER_MARK)
        whole = self._render([user, reply, user], prompt=False).split(_REPLY_MARK)
        if len(opened) != 2 or len(whole) != 2 or _USER_MARK not in whole[1]:
            raise InvalidRequestError("model", "the chat template does not keep messages whole")
        to_answer, to_user = self.encode(opened[1]), self.encode(whole[1].split(_USER_MARK)[0])
        if not to_answer or not to_user:
            raise InvalidRequestError("model", "the chat template puts nothing between turns")
        return DialogFormat(tuple(to_answer), tuple(to_user), end_ids or (to_user[0],))
