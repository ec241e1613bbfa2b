"""Named configurations to measure, as written on the command line or in a TOML or JSON file.

    --variant real=initial_tree:real --variant root=initial_tree:root-only --variant hf=baseline:transformers

A variant is a cluster of its own (settings of the cluster's spec), a router that runs already (`router:host:port`),
or another way to generate (`baseline:transformers`, `baseline:prompt-lookup`, `baseline:plain-loop`).
"""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, get_origin, get_type_hints

import msgspec

from graftline.bench.baseline_protocol import BaselineDtype, BaselineKind, BaselineSettings
from graftline.errors import InvalidRequestError

S = TypeVar("S")

_WORDS = {"on": "true", "yes": "true", "off": "false", "no": "false"}


class VariantKind(Enum):
    """What is measured."""

    CLUSTER = "cluster"
    ROUTER = "router"
    BASELINE = "baseline"


@dataclass(frozen=True, slots=True)
class Variant:
    """A name and the settings given for it, as text."""

    name: str
    settings: Mapping[str, str]

    @property
    def kind(self) -> VariantKind:
        """Decided by the settings."""
        for kind in (VariantKind.ROUTER, VariantKind.BASELINE):
            if kind.value in self.settings:
                return kind
        return VariantKind.CLUSTER


def parse_variant(text: str) -> Variant:
    """`name=key:value,key:value`, or a name alone for the defaults.

    Raises:
        InvalidRequestError: no name, a setting that is not key:value, or a key twice.
    """
    name, _, rest = text.partition("=")
    if not name.strip():
        raise InvalidRequestError("variant", f"{text!r} is not name=key:value,...")
    return Variant(name.strip(), parse_settings(rest))


def parse_settings(text: str) -> dict[str, str]:
    """`key:value,key:value`; a value may hold further colons, and commas: `split:10,20,stages:2` is two settings.

    Raises as `parse_variant`.
    """
    settings: dict[str, str] = {}
    key = ""
    for part in filter(None, (part.strip() for part in text.split(","))):
        before, colon, value = part.partition(":")
        if not colon and key:
            settings[key] += f",{part}"
            continue
        key = before
        if not colon or not key:
            raise InvalidRequestError("variant", f"{part!r} is not key:value")
        if key in settings:
            raise InvalidRequestError("variant", f"{key!r} is set twice in {text!r}")
        settings[key] = value
    return settings


def read_variants(path: Path) -> list[Variant]:
    """Variants of a TOML or JSON file: one table a variant, `[variants.NAME]` or at the top level, in order.

    Raises:
        InvalidRequestError: not readable, or not such a table.
    """
    try:
        text = path.read_text(encoding="utf-8")
        raw: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise InvalidRequestError("variants", f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise InvalidRequestError("variants", f"{path}: {error}") from error
    tables = raw.get("variants", raw) if isinstance(raw, dict) else None
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise InvalidRequestError("variants", f"{path} is not a table of tables")
    return [Variant(name, {key: _as_text(value) for key, value in table.items()}) for name, table in tables.items()]


def check_names(variants: Sequence[Variant]) -> None:
    """Refuses two variants of one name.

    Raises:
        InvalidRequestError: naming it.
    """
    names = [variant.name for variant in variants]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InvalidRequestError("variant", f"the name {twice[0]!r} is used twice")


def baseline_settings(variant: Variant, model: str, threads: int) -> BaselineSettings:
    """The baseline that a variant asks for.

    Args:
        model: used unless the variant names another.
        threads: likewise.

    Raises:
        InvalidRequestError: an unknown setting or value.
    """
    start = BaselineSettings(kind=BaselineKind.PLAIN_LOOP, model=model, threads=threads)
    hints = get_type_hints(BaselineSettings)
    changes = {
        name: _converted(f"{variant.name}.{key}", text, hints, name)
        for key, text in variant.settings.items()
        for name in ["kind" if key == "baseline" else key]
    }
    return msgspec.structs.replace(start, **changes)


def with_settings(spec: S, settings: Mapping[str, str], where: str = "") -> S:
    """A frozen dataclass with settings changed; `a.b` reaches into a dataclass or a mapping of texts inside it.

    Args:
        where: put before field names in messages.

    Raises:
        InvalidRequestError: an unknown field (the message lists the known ones), or a value that does not fit.
    """
    assert is_dataclass(spec)
    assert not isinstance(spec, type)
    hints = get_type_hints(type(spec))
    inner: dict[str, dict[str, str]] = {}
    changes: dict[str, Any] = {}
    for key, text in settings.items():
        name, dot, rest = key.partition(".")
        name = name.replace("-", "_")
        if name not in {field.name for field in fields(spec)}:
            known = ", ".join(sorted(hints))
            raise InvalidRequestError(f"{where}{key}", f"there is no such setting; there are: {known}")
        if dot:
            inner.setdefault(name, {})[rest] = text
        else:
            changes[name] = _converted(f"{where}{key}", text, hints, name)
    for name, inner_settings in inner.items():
        value = changes.get(name, getattr(spec, name))
        if isinstance(value, Mapping):
            changes[name] = {**value, **inner_settings}
        elif is_dataclass(value):
            changes[name] = with_settings(value, inner_settings, f"{where}{name}.")
        else:
            raise InvalidRequestError(f"{where}{name}", "has no settings inside it")
    return replace(spec, **changes)


def _converted(field: str, text: str, hints: Mapping[str, Any], name: str) -> Any:
    if name not in hints:
        raise InvalidRequestError(field, f"there is no such setting; there are: {', '.join(sorted(hints))}")
    wanted = hints[name]
    candidates: list[Any] = [text, _WORDS.get(text.lower(), text)]
    if get_origin(wanted) is tuple:
        candidates = [text.split(",") if text else []]
    problem = ""
    for candidate in candidates:
        try:
            return msgspec.convert(candidate, wanted, strict=False, dec_hook=_from_text)
        except msgspec.ValidationError as error:
            problem = str(error)
    if isinstance(wanted, type) and issubclass(wanted, Enum):
        problem = f"choose of {', '.join(str(entry.value) for entry in wanted)}"
    raise InvalidRequestError(field, f"{text!r} does not fit: {problem}")


def _from_text(wanted: type[Any], value: Any) -> Any:
    if wanted is Path:
        return Path(value)
    raise NotImplementedError


def _as_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ",".join(str(entry) for entry in value)
    return str(value)


# What `graftline bench --compare` measures when no variant is named: what speculation and the handed-over tree bring,
# beside other ways to generate from the same weights. Ratios are over the first.
STANDARD_VARIANTS = (
    Variant("no-speculation", {"speculation": "off"}),
    Variant("root-only", {"initial_tree": "root-only"}),
    Variant("real", {"initial_tree": "real"}),
    *(
        Variant(f"{short}-{dtype.value}", {"baseline": kind.value, "dtype": dtype.value})
        for dtype in BaselineDtype
        for short, kind in (("transformers", BaselineKind.TRANSFORMERS), ("lookup", BaselineKind.PROMPT_LOOKUP))
    ),
)
