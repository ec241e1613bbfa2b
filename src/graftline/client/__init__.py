"""A typed client of the router: `AsyncClient`, its blocking twin `Client`, and what they return.

    async with AsyncClient("localhost:50050") as client:
        async for delta in client.generate([Message("user", "Hello")], max_tokens=64):
            print(delta.text, end="")

Errors are those of `graftline.errors`.
"""

from graftline.client.aio import AsyncClient
from graftline.client.blocking import Client
from graftline.client.request import GenerateOptions, Message, Prompt
from graftline.client.results import (
    Choice,
    Completion,
    Delta,
    Finish,
    FinishReason,
    Handoff,
    ModelInfo,
    Speculation,
    TokenLogprob,
    TreeOrigin,
    Usage,
)

__all__ = [
    "AsyncClient",
    "Choice",
    "Client",
    "Completion",
    "Delta",
    "Finish",
    "FinishReason",
    "GenerateOptions",
    "Handoff",
    "Message",
    "ModelInfo",
    "Prompt",
    "Speculation",
    "TokenLogprob",
    "TreeOrigin",
    "Usage",
]
