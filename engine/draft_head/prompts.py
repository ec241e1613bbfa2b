"""Beginnings of user turns for the target to finish: what makes self-written data cover chat, code, tools and sums.

Everything here is made up or put together from word lists; no published prompt is in it.
"""

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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


_PERSONAS = (
    "You are a helpful assistant.",
    "You are a friendly and concise assistant. Answer in a few sentences.",
    "You are a patient teacher who explains things step by step.",
    "You are an expert writer. You help people with letters, stories and poems.",
    "You are a knowledgeable travel guide.",
    "You are a cook who likes simple recipes.",
    "You answer questions about science truthfully and clearly.",
    "You are an assistant for a small company. Be polite and professional.",
    "Reply with short, plain sentences.",
    "You are a careful editor. Correct and improve the text you are given.",
)
_CHAT_STARTS = tuple(
    [
        "",
        "What",
        "What is",
        "What are",
        "How",
        "How do I",
        "How does",
        "How can",
        "Why",
        "Why do",
        "Who",
        "When",
        "Where",
        "Which",
        "Can you",
        "Can you explain",
        "Could you",
        "Please",
        "Please write",
        "Write",
        "Write a short",
        "Write a story about",
        "Write a letter",
        "Write an email to",
        "Give me",
        "Give me a list of",
        "List",
        "Name three",
        "Tell me",
        "Tell me about",
        "Explain",
        "Describe",
        "Summarize",
        "Compare",
        "Suggest",
        "Help me",
        "I",
        "I'm",
        "I want to",
        "I have",
        "I need",
        "My",
        "Is",
        "Are",
        "Do",
        "Does",
        "Should I",
        "Let's",
        "Imagine",
        "The",
        "In",
        "If",
        "Translate",
        "Rewrite",
        "Create",
        "Make",
        "What do you think about",
        "What's the difference between",
        "How would you",
        "Hi",
        "Hello",
        "Thank you",
        "Recommend",
    ]
)
_CODE_PERSONAS = (
    "",
    "",
    "You are a helpful programming assistant.",
    "You are an expert Python programmer. Answer with code.",
    "You write clean, well documented code.",
)
_CODE_STARTS = tuple(
    [
        "Write a Python function",
        "Write a function that",
        "Write a program",
        "Implement",
        "Implement a class",
        "How do I",
        "Fix this code:\n",
        "Explain this code:\n\n```python\n",
        "What does this function do?\n\n```python\ndef ",
        "Finish this function:\n\n```python\ndef ",
        "Finish this function:\n\n```python\nfrom typing import ",
        "Write the body of this function.\n\n```python\ndef ",
        "Here is a Python function that is not done yet. Please finish it.\n\n```python\ndef ",
        "def ",
        "import ",
        "class ",
        "Write a JavaScript function",
        "Write a SQL query",
        "Write a shell script",
        "Write unit tests for",
        "Refactor this:\n\n```python\n",
        "Please implement the following:\n\n```python\nfrom typing import List\n\n\ndef ",
        "Using Python, ",
        "In Python, how",
        "Given a list of",
        "Given a string",
        "Write code to",
        "Create a function called",
        "Sort",
        "Parse",
    ]
)
_CODE_VERBS = tuple(
    [
        "count",
        "find",
        "is",
        "has",
        "get",
        "sum",
        "sort",
        "filter",
        "remove",
        "merge",
        "split",
        "parse",
        "encode",
        "decode",
        "max",
        "min",
        "check",
        "make",
        "reverse",
        "rotate",
        "convert",
        "validate",
        "flatten",
        "group",
        "unique",
        "compute",
        "select",
        "replace",
        "join",
        "match",
        "format",
        "build",
        "read",
    ]
)
_CODE_NOUNS = tuple(
    [
        "words",
        "numbers",
        "list",
        "string",
        "digits",
        "prime",
        "palindrome",
        "elements",
        "pairs",
        "vowels",
        "brackets",
        "matrix",
        "tree",
        "dates",
        "lines",
        "names",
        "letters",
        "sequence",
        "intervals",
        "odds",
        "evens",
        "duplicates",
        "primes",
        "path",
        "tokens",
        "keys",
        "values",
        "index",
        "range",
        "items",
        "factors",
    ]
)
_CODE_TYPES = ("int", "str", "float", "bool", "List[int]", "List[str]", "list", "dict", "Optional[int]")
_TOOL_INSTRUCTIONS = (
    "You are an assistant that can use tools. Available tools:\n{tools}\nTo use a tool, reply with JSON: "
    '{{"name": "...", "arguments": {{...}}}}.',
    'You have access to the functions below. Call one by writing <tool_call>{{"name": <function name>, '
    '"arguments": <arguments>}}</tool_call>.\n<tools>\n{tools}\n</tools>',
    "You are an expert in composing function calls. Given a question and these functions, answer with the calls "
    "needed, as [func(param=value, ...)]. If no function fits, say so.\n{tools}",
    "# Tools\n\nYou may call one or more functions to help the user.\n\n{tools}\n\nFor each call return a JSON object "
    "with the function's name and its arguments within <tool_call></tool_call> tags.",
    "Answer the user's request with the tools given here as JSON, and only with them.\n\nTools: {tools}",
)
_TOOL_STARTS = tuple(
    [
        "",
        "Can you",
        "Could you",
        "Please",
        "I need",
        "I want to",
        "I'd like",
        "Find",
        "Get",
        "Show me",
        "What is",
        "What's the",
        "Calculate",
        "Book",
        "Look up",
        "Check",
        "How much",
        "How many",
        "Give me",
        "Search for",
        "Tell me",
        "Set",
        "Create",
        "Send",
        "Convert",
        "Is there",
        "Which",
    ]
)
_TOOL_VERBS = tuple(
    [
        "get",
        "find",
        "search",
        "create",
        "update",
        "delete",
        "calculate",
        "book",
        "send",
        "list",
        "convert",
        "check",
        "fetch",
        "compute",
        "track",
        "schedule",
        "cancel",
        "order",
        "compare",
        "predict",
        "analyze",
        "translate",
        "generate",
        "query",
        "estimate",
        "lookup",
    ]
)
_TOOL_NOUNS: Mapping[str, tuple[str, ...]] = {
    "weather": ("city", "date", "unit", "days"),
    "flight": ("origin", "destination", "date", "passengers", "cabin_class"),
    "hotel": ("city", "check_in", "check_out", "guests", "max_price"),
    "restaurant": ("location", "cuisine", "price_range", "party_size", "time"),
    "stock_price": ("symbol", "start_date", "end_date", "currency"),
    "exchange_rate": ("from_currency", "to_currency", "amount", "date"),
    "recipe": ("ingredients", "diet", "max_minutes", "servings"),
    "movie": ("title", "genre", "year", "rating"),
    "song": ("artist", "album", "title", "year"),
    "email": ("to", "subject", "body", "cc"),
    "meeting": ("title", "start_time", "duration_minutes", "attendees"),
    "distance": ("start", "end", "unit", "mode"),
    "loan_payment": ("principal", "annual_rate", "years", "extra_payment"),
    "area": ("shape", "width", "height", "radius", "unit"),
    "population": ("country", "year", "region"),
    "book": ("title", "author", "isbn", "language"),
    "order": ("order_id", "status", "customer_name", "quantity"),
    "user_profile": ("user_id", "name", "email", "age"),
    "file": ("path", "pattern", "recursive", "max_size"),
    "sensor_data": ("device_id", "start_time", "end_time", "interval"),
    "news": ("topic", "country", "language", "limit"),
    "route": ("origin", "destination", "avoid_tolls", "departure_time"),
    "speed": ("distance", "time", "initial_velocity", "acceleration"),
    "probability": ("events", "trials", "success_rate"),
    "game_score": ("team", "league", "season", "player"),
    "taxi": ("pickup", "dropoff", "ride_type", "time"),
    "medicine": ("name", "dose_mg", "patient_age", "weight_kg"),
    "energy": ("mass", "velocity", "height", "gravity"),
    "property": ("city", "bedrooms", "min_price", "max_price", "property_type"),
    "ticket": ("event", "venue", "date", "seats"),
}
_PARAMETER_WORDS = (
    "The {p} of the {n}.",
    "The {p} to use.",
    "Name or value of the {p}, for example as given by the user.",
    "The {p}. Defaults to none.",
    "{p} of the {n} (optional)",
    "The {p} for which the {n} is requested, in the usual format.",
)
_SUM_STARTS = tuple(
    [
        "A farmer has",
        "A shop sells",
        "Tom has",
        "Sarah buys",
        "Maria has",
        "A train",
        "A car travels",
        "If",
        "Calculate",
        "Compute",
        "Solve",
        "Find",
        "What is the sum of",
        "What is the area of",
        "How many",
        "How much",
        "There are",
        "A class of",
        "A box contains",
        "John earns",
        "What is the average of",
        "Convert",
        "Simplify",
        "Evaluate",
        "Work out",
        "A tank",
        "A bus",
        "Two numbers",
        "The price of",
        "Emma reads",
    ]
)


def _chat(rng: random.Random) -> Opening:
    system = "" if rng.random() < 0.6 else rng.choice(_PERSONAS)
    return Opening(system, rng.choice(_CHAT_STARTS))


def _code(rng: random.Random) -> Opening:
    start = rng.choice(_CODE_STARTS)
    if start.endswith("def ") and rng.random() < 0.7:
        start += _signature(rng)
    elif start == "Create a function called":
        start += f" {rng.choice(_CODE_VERBS)}_{rng.choice(_CODE_NOUNS)}"
    return Opening(rng.choice(_CODE_PERSONAS), start)


def _signature(rng: random.Random) -> str:
    """A function's head and the opening of its docstring."""
    names = rng.sample(("n", "x", "items", "text", "numbers", "s", "values", "k", "lst", "limit"), rng.randint(1, 3))
    typed = rng.random() < 0.6
    arguments = ", ".join(f"{name}: {rng.choice(_CODE_TYPES)}" if typed else name for name in names)
    returns = f" -> {rng.choice(_CODE_TYPES)}" if typed else ""
    doc = rng.choice(('    """', '    """ ', "    '''", ""))
    return f"{rng.choice(_CODE_VERBS)}_{rng.choice(_CODE_NOUNS)}({arguments}){returns}:\n{doc}"


def _tools(rng: random.Random) -> Opening:
    tools = [_tool(rng) for _ in range(rng.choice((1, 1, 1, 2, 2, 3)))]
    indent = rng.choice((None, None, None, 1))
    text = json.dumps(tools, indent=indent) if rng.random() < 0.7 else "\n".join(json.dumps(tool) for tool in tools)
    return Opening(rng.choice(_TOOL_INSTRUCTIONS).format(tools=text), rng.choice(_TOOL_STARTS))


def _tool(rng: random.Random) -> dict[str, object]:
    noun = rng.choice(tuple(_TOOL_NOUNS))
    names = rng.sample(_TOOL_NOUNS[noun], rng.randint(1, min(4, len(_TOOL_NOUNS[noun]))))
    verb = rng.choice(_TOOL_VERBS)
    spoken = noun.replace("_", " ")
    properties: dict[str, object] = {}
    for name in names:
        words = rng.choice(_PARAMETER_WORDS).format(p=name.replace("_", " "), n=spoken)
        properties[name] = {
            "type": rng.choice(("string", "string", "integer", "float", "boolean")),
            "description": words,
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
        return Opening(system, rng.choice(_SUM_STARTS))
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
