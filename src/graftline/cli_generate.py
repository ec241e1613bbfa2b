"""`graftline generate`: one prompt to a running router, streamed to the terminal."""

import asyncio
import sys
from typing import Annotated

import typer
from rich.console import Console

from graftline import cli_options as shared
from graftline.client import AsyncClient, Delta, Finish, GenerateOptions, Message
from graftline.proto.channel import Access

app = typer.Typer()


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    router: Annotated[str, typer.Option(help="host:port of the router.")] = "127.0.0.1:7000",
    chat: Annotated[bool, typer.Option("--chat", help="Take the prompt as a user's chat message.")] = False,
    system: Annotated[str, typer.Option(help="A system message before it; implies --chat.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="Output tokens at most.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Nucleus of the distribution.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed draws the same tokens.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer.")] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Print figures of the request afterwards.")] = False,
    timeout_s: Annotated[float | None, typer.Option(min=0.1, help="Deadline.")] = None,
    token: shared.Token = None,
    tls_certificate: shared.TlsCertificate = None,
    tls_key: shared.TlsKey = None,
    tls_ca: shared.TlsCa = None,
) -> None:
    """Generate text for one prompt."""
    text = sys.stdin.read() if prompt == "-" else prompt
    messages = [Message("system", system)] if system else []
    asked = [*messages, Message("user", text)] if chat or system else text
    options = GenerateOptions(max_tokens=max_tokens, temperature=temperature, top_p=top_p, stop=stop or [])
    if seed is not None:
        options["seed"] = seed
    access = shared.access(token, tls_certificate, tls_key, tls_ca)
    finish = asyncio.run(_stream(router, access, asked, options, timeout_s))
    if stats and finish is not None:
        Console(stderr=True).print(figures(finish), markup=False, highlight=False)


async def _stream(
    router: str, access: Access, asked: str | list[Message], options: GenerateOptions, timeout_s: float | None
) -> Finish | None:
    finish: Finish | None = None
    async with AsyncClient(router, token=access.token, tls=access.tls, timeout_s=timeout_s) as client:
        async for delta in client.generate(asked, **options):
            write(delta)
            finish = delta.finish or finish
    sys.stdout.write("\n")
    return finish


def write(delta: Delta) -> None:
    """Puts what is new on standard output."""
    sys.stdout.write(delta.text)
    sys.stdout.flush()


def figures(finish: Finish) -> str:
    """A request's figures in one line."""
    usage, speculation, handoff = finish.usage, finish.speculation, finish.handoff
    accept = f"{speculation.accept_length:.2f}" if speculation.accept_length is not None else "-"
    return (
        f"{finish.reason.value}; {usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), "
        f"{usage.completion_tokens} output tokens; accept length {accept} over {speculation.rounds} rounds, "
        f"first tree {speculation.tree_origin.value}; {handoff.num_bytes} bytes handed over; "
        f"{finish.attempts} attempt{'s' if finish.attempts != 1 else ''}"
    )
