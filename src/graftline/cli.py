"""`graftline`: the command line. Heavy commands are imported when they are used."""

import asyncio
import importlib
import importlib.util
import sys
from typing import Annotated, Any

import typer
import typer.core
import typer.main
from rich.console import Console
from rich.table import Table

import graftline
from graftline.errors import GraftlineError
from graftline.worker.process import begin_process

# name -> module with an attribute `app`; imported when the command is asked for.
LAZY_COMMANDS = {
    "up": "graftline.cli_cluster",
    "demo": "graftline.cli_cluster",
    "prefill": "graftline.cli_worker",
    "decode": "graftline.cli_worker",
    "plan": "graftline.cli_worker",
    "router": "graftline.cli_router",
    "drain": "graftline.cli_router",
    "generate": "graftline.cli_generate",
    "top": "graftline.cli_top",
    "bench": "graftline.bench.cli",
    "chaos": "graftline.bench.chaos_cli",
    "draft-head": "graftline.cli_draft_head",
}
# Sub-applications: the module's whole app stands under one name.
WHOLE_APPS = {"bench", "draft-head"}


class LazyGroup(typer.core.TyperGroup):
    """Knows the names of all commands, and imports their modules late."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Every command whose module is there."""
        return sorted({*super().list_commands(ctx), *(name for name in LAZY_COMMANDS if _exists(name))})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command, imported if need be."""
        if cmd_name not in LAZY_COMMANDS or not _exists(cmd_name):
            return super().get_command(ctx, cmd_name)
        loaded = typer.main.get_command(importlib.import_module(LAZY_COMMANDS[cmd_name]).app)
        if cmd_name in WHOLE_APPS:
            loaded.name = cmd_name
            return loaded
        # A module with a single command makes no group.
        return loaded.get_command(ctx, cmd_name) if isinstance(loaded, typer.core.TyperGroup) else loaded


def _exists(name: str) -> bool:
    return importlib.util.find_spec(LAZY_COMMANDS[name]) is not None


app = typer.Typer(
    cls=LazyGroup,
    help="Large language models with prefill and decode on separate services, and a real draft tree handed over.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
model_app = typer.Typer(help="Named models and the local store.", no_args_is_help=True)
app.add_typer(model_app, name="model")


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """See the commands below."""
    if version:
        typer.echo(graftline.__version__)
        raise typer.Exit


@model_app.command("fetch")
def fetch_model(name: Annotated[str, typer.Argument(help="A known name: see `graftline model list`.")]) -> None:
    """Bring a named model into the local store, unless it is there already."""
    from graftline.engine.model_fetch import fetch_with_bar

    typer.echo(fetch_with_bar(name))


@model_app.command("list")
def list_models() -> None:
    """Known models, and which of them are in the local store."""
    from graftline.engine.model_fetch import CATALOG, store_path

    table = Table("name", "size", "in the store", "source")
    for name, model in CATALOG.items():
        path = store_path() / "models" / name / model.file_name
        table.add_row(name, f"{model.num_bytes / 1e6:.0f} MB", "yes" if path.is_file() else "no", model.requirement)
    Console().print(table)


def main() -> None:
    """Runs the command line; errors of the world become one line and exit status 1 (2 for bad input)."""
    from graftline.errors import InvalidRequestError, UnauthenticatedError

    begin_process()
    try:
        app()
    except GraftlineError as error:
        hint = " (--token, GRAFTLINE_TOKEN or GRAFTLINE_TOKEN_FILE)" if isinstance(error, UnauthenticatedError) else ""
        console = Console(stderr=True, soft_wrap=True)
        console.print(f"graftline: {error}{hint}", style="red", markup=False, highlight=False)
        sys.exit(2 if isinstance(error, InvalidRequestError) else 1)
    except asyncio.CancelledError:
        sys.exit(130)


if __name__ == "__main__":
    main()
