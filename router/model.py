"""A served model as text sees it: tokenizer, vocabulary and chat template, built from a worker's model card."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any

from graftline.errors import IncompatibleError, InvalidRequestError, PromptTooLongError
from graftline.proto.v1.common_pb2 import ModelCard
from graftline.router.text.chat_template import ChatTemplate, Message
from graftline.router.text.detokenizer import Vocabulary
from graftline.router.text.tokenizer import TextTokenizer


class UnknownModelError(InvalidRequestError):
    """A model was asked for that no worker serves."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model card, ready for use.

    Attributes:
        sampling_defaults: values of fields of GenerateRequest, where a request has none.
        card: what it was built from, or that of a model with another name and all else the same.
    """

    model_id: str
    card_hash: str
    vocab_size: int
    context_length: int
    eos_token_ids: frozenset[int]
    tokenizer: TextTokenizer
    vocabulary: Vocabulary
    chat_template: ChatTemplate | None
    sampling_defaults: Mapping[str, Any]
    card: ModelCard

    @classmethod
    def load(cls, card: ModelCard) -> "ServedModel":
        """Builds everything; takes up to seconds for large vocabularies.

        Raises:
            IncompatibleError: tokenizer or template cannot be read, or a number is missing.
        """
        for name in ("vocab_size", "context_length"):
            if getattr(card, name) == 0:
                raise IncompatibleError((name,), f"the model card of {card.model_id!r} has no {name}")
        tokenizer = TextTokenizer(card.tokenizer_json, card.bos_token_id)
        template = ChatTemplate(card.chat_template, card.special_tokens) if card.chat_template else None
        return cls(
            card.model_id,
            card.card_hash,
            card.vocab_size,
            card.context_length,
            frozenset(card.eos_token_ids),
            tokenizer,
            Vocabulary(tokenizer),
            template,
            {field.name: value for field, value in card.sampling_defaults.ListFields()},
            card,
        )

    @property
    def identity(self) -> tuple[str, str]:
        """Equal for cards of one model. The hash leaves the name out, and models trained from one another differ in
        nothing else that a card holds.
        """
        return self.model_id, self.card_hash

    def encode_text(self, text: str, max_tokens: int) -> list[int]:
        """Token ids of a text.

        Raises:
            PromptTooLongError: it must have more than `max_tokens`: told without encoding it, which takes seconds.
        """
        self._check_could_fit(text, max_tokens, "text")
        return self.tokenizer.encode_text(text)

    def encode_chat(self, messages: Sequence[Message], max_tokens: int) -> list[int]:
        """Token ids of a chat.

        Raises:
            InvalidRequestError: a bad chat, or a model without a chat template.
            PromptTooLongError: as `encode_text`.
        """
        if self.chat_template is None:
            raise InvalidRequestError("chat", f"the model {self.model_id!r} has no chat template; send text instead")
        rendered = self.chat_template.render(messages, self.tokenizer.special_tokens)
        if not rendered.literals:
            self._check_could_fit(rendered.text, max_tokens, "chat")
        return self.tokenizer.encode_chat(rendered)

    def _check_could_fit(self, text: str, max_tokens: int, field: str) -> None:
        longest = self.tokenizer.longest_token_chars
        if longest and len(text) > longest * max_tokens:
            problem = f"{len(text)} characters are at least {-(-len(text) // longest)} tokens"
            raise PromptTooLongError(field, f"{problem} and leave no room for output in {max_tokens}")


class ModelStore:
    """Loads each distinct card once, whatever names it has; keeps the few that are in use."""

    def __init__(self, executor: Executor, max_models: int = 8) -> None:
        self._executor = executor
        self._max_models = max_models
        self._models: dict[str, ServedModel] = {}
        self._turn = asyncio.Lock()  # workers of one model come up together, and each would build it

    def has(self, card_hash: str) -> bool:
        """True when a worker may leave tokenizer and template out of its answer."""
        return card_hash in self._models

    async def load(self, card: ModelCard) -> ServedModel:
        """The model of a card, from memory or built off the event loop. Raises as `ServedModel.load`."""
        model = self._models.get(card.card_hash)
        if model is None:
            async with self._turn:
                model = self._models.get(card.card_hash) or await self._build(card)
        return model if model.model_id == card.model_id else replace(model, model_id=card.model_id)

    async def _build(self, card: ModelCard) -> ServedModel:
        try:
            model = await asyncio.get_running_loop().run_in_executor(self._executor, ServedModel.load, card)
        except IncompatibleError:
            raise
        except Exception as error:  # a card is foreign input; what it breaks must not end the router
            raise IncompatibleError(("model_card",), f"{type(error).__name__}: {error}") from error
        self._models[card.card_hash] = model
        while len(self._models) > self._max_models:
            del self._models[next(iter(self._models))]
        return model
