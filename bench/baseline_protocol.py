"""What the benchmark and a baseline's process say to each other: one JSON object a line, over its stdin and stdout."""

from enum import Enum

import msgspec

from graftline.bench.prompt_set import Prompt


class BaselineKind(Enum):
    """Which other way to generate."""

    TRANSFORMERS = "transformers"
    PROMPT_LOOKUP = "prompt-lookup"
    PLAIN_LOOP = "plain-loop"


class BaselineDtype(Enum):
    """What weights and activations of a baseline are."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class BaselineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A baseline.

    Attributes:
        model: a Hugging Face directory or GGUF file (a known name is resolved before it gets here).
        threads: of torch; 0: as many as there are cores.
        lookup_tokens: drafts per round of prompt lookup; transformers' documentation uses 10, which costs a
            CPU more than it gains.
    """

    kind: BaselineKind
    model: str
    dtype: BaselineDtype = BaselineDtype.FLOAT32
    threads: int = 0
    lookup_tokens: int = 3


class GenerateCommand(msgspec.Struct, frozen=True, kw_only=True):
    """Generate greedily."""

    prompt: Prompt
    max_tokens: int
    ignore_eos: bool


class ReadyReply(msgspec.Struct, frozen=True, tag="ready"):
    """The model is loaded."""

    threads: int


class TokensReply(msgspec.Struct, frozen=True, tag="tokens"):
    """New output ids."""

    token_ids: tuple[int, ...]


class DoneReply(msgspec.Struct, frozen=True, tag="done"):
    """The request is complete."""

    num_prompt_tokens: int
    reason: str


class FailedReply(msgspec.Struct, frozen=True, tag="failed"):
    """The request, or loading the model, failed; `field` names what was wrong with the input, if that was it."""

    message: str
    field: str = ""


Reply = ReadyReply | TokensReply | DoneReply | FailedReply
