"""The process of one baseline: loads its model, then answers one command at a time and sleeps in between."""

import os
import sys
from collections.abc import Sequence
from typing import BinaryIO

import msgspec
import torch

from graftline.bench.baseline_models import BaselineModel, PromptEncoder, open_baseline
from graftline.bench.baseline_protocol import (
    BaselineSettings,
    DoneReply,
    FailedReply,
    GenerateCommand,
    ReadyReply,
    Reply,
    TokensReply,
)
from graftline.errors import GraftlineError, InvalidRequestError


def main() -> int:
    """Entry: argv[1] is `BaselineSettings` as JSON."""
    # Whatever libraries print goes to stderr; stdout carries replies alone.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    settings = msgspec.json.decode(sys.argv[1], type=BaselineSettings)
    torch.set_num_threads(settings.threads or len(os.sched_getaffinity(0)))
    try:
        model, encoder = open_baseline(settings)
    except GraftlineError as error:
        _reply(replies, _failed(error))
        return 1
    _reply(replies, ReadyReply(torch.get_num_threads()))
    with torch.inference_mode():
        for line in sys.stdin.buffer:
            _answer(msgspec.json.decode(line, type=GenerateCommand), model, encoder, replies)
    return 0


def _answer(command: GenerateCommand, model: BaselineModel, encoder: PromptEncoder, replies: BinaryIO) -> None:
    num_tokens = 0

    def emit(token_ids: Sequence[int]) -> None:
        nonlocal num_tokens
        num_tokens += len(token_ids)
        _reply(replies, TokensReply(tuple(token_ids)))

    try:
        prompt_ids = encoder.encode(command.prompt)
        model.generate(prompt_ids, command.max_tokens, ignore_eos=command.ignore_eos, emit=emit)
    except GraftlineError as error:
        _reply(replies, _failed(error))
        return
    reason = "length" if num_tokens >= command.max_tokens else "stop"
    _reply(replies, DoneReply(len(prompt_ids), reason))


def _failed(error: GraftlineError) -> FailedReply:
    if isinstance(error, InvalidRequestError):
        return FailedReply(error.problem, error.field)
    return FailedReply(str(error))


def _reply(replies: BinaryIO, reply: Reply) -> None:
    replies.write(msgspec.json.encode(reply) + b"\n")


if __name__ == "__main__":
    sys.exit(main())
