"""Beginnings of user turns for the target to finish: what makes self-written data cover chat, code, tools and sums.

Everything here is made up or put together from word lists; no published prompt is in it.
"""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from graftline.engine.draft_head import prompt_words as words

KINDS = ("chat", "code", "tools", "arithmetic")


@dataclass(frozen=True, slots=True)
class Opening:
    """A system message ("" for the template's own) and the first words of a user turn."""

    system: str
    start: str


def opening(kind: str, seed: int) -> Opening:
    """The opening of that kind and seed; equal arguments, equal opening.

    Raises:
        KeyError: an unknown kind.
    """
    return _MAKERS[kind](random.Random(f"{kind}/{seed}"))


def _chat(rng: random.Random) -> Opening:
    system = "" if rng.random() < 0.6 else rng.choice(words.PERSONAS)
    return Opening(system, rng.choice(words.CHAT_STARTS))


def _code(rng: random.Random) -> Opening:
    start = rng.choice(words.CODE_STARTS)
    if start.endswith("def ") and rng.random() < 0.7:
        start += _signature(rng)
    elif start == "Create a function called":
        start += f" {rng.choice(words.CODE_VERBS)}_{rng.choice(words.CODE_NOUNS)}"
    return Opening(rng.choice(words.CODE_PERSONAS), start)


def _signature(rng: random.Random) -> str:
    """A function's head and the opening of its docstring."""
    names = rng.sample(("n", "x", "items", "text", "numbers", "s", "values", "k", "lst", "limit"), rng.randint(1, 3))
    typed = rng.random() < 0.6
    arguments = ", ".join(f"{name}: {rng.choice(words.CODE_TYPES)}" if typed else name for name in names)
    returns = f" -> {rng.choice(words.CODE_TYPES)}" if typed else ""
    doc = rng.choice(('    """', '    """ ', "    '''", ""))
    return f"{rng.choice(words.CODE_VERBS)}_{rng.choice(words.CODE_NOUNS)}({arguments}){returns}:\n{doc}"


def _tools(rng: random.Random) -> Opening:
    tools = [_tool(rng) for _ in range(rng.choice((1, 1, 1, 2, 2, 3)))]
    indent = rng.choice((None, None, None, 1))
    text = json.dumps(tools, indent=indent) if rng.random() < 0.7 else "\n".join(json.dumps(tool) for tool in tools)
    return Opening(rng.choice(words.TOOL_INSTRUCTIONS).format(tools=text), rng.choice(words.TOOL_STARTS))


def _tool(rng: random.Random) -> dict[str, object]:
    noun = rng.choice(tuple(words.TOOL_NOUNS))
    names = rng.sample(words.TOOL_NOUNS[noun], rng.randint(1, min(4, len(words.TOOL_NOUNS[noun]))))
    verb = rng.choice(words.TOOL_VERBS)
    spoken = noun.replace("_", " ")
    properties: dict[str, object] = {}
    for name in names:
        description = rng.choice(words.PARAMETER_WORDS).format(p=name.replace("_", " "), n=spoken)
        properties[name] = {
            "type": rng.choice(("string", "string", "integer", "float", "boolean")),
            "description": description,
        }
    function: dict[str, object] = {
        "name": rng.choice((f"{verb}_{noun}", f"{noun}.{verb}", f"{verb}{noun.title().replace('_', '')}")),
        "description": rng.choice((f"{verb.title()} the {spoken}", f"{verb.title()}s {spoken} data"))
        + rng.choice((".", f" by {names[0].replace('_', ' ')}.", " for the given parameters.")),
        "parameters": {
            "type": rng.choice(("object", "dict")),
            "properties": properties,
            "required": names[: rng.randint(1, len(names))],
        },
    }
    return {"type": "function", "function": function} if rng.random() < 0.25 else function


def _arithmetic(rng: random.Random) -> Opening:
    system = "" if rng.random() < 0.8 else "You solve math problems step by step."
    if rng.random() < 0.6:
        return Opening(system, rng.choice(words.SUM_STARTS))
    a, b, c = rng.randint(2, 999), rng.randint(2, 99), rng.randint(2, 20)
    start = rng.choice(
        (
            f"What is {a} + {b}?",
            f"What is {a} - {b}",
            f"{a} * {c} =",
            f"Divide {a * c} by {c}.",
            f"Solve {c}x + {b} = {a}.",
            f"What is {b}% of {a}?",
            f"Add {a}, {b} and {c}",
            f"A shop has {a} apples and sells {b}",
            f"If a pen costs {c} dollars, how much do {b}",
            f"A rectangle has sides of {b} and {c}",
        )
    )
    return Opening(system, start)


_MAKERS: Mapping[str, Callable[[random.Random], Opening]] = {
    "chat": _chat,
    "code": _code,
    "tools": _tools,
    "arithmetic": _arithmetic,
}
