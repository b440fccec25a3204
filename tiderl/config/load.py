"""From TOML files and flags to one `Config`, and from a `Config` to JSON and back.

Every value names its origin when it is refused: the dotted path of the setting, the file, and what would be right.

Invariants (tests/unit/test_config_load.py):

1. Files are laid over the defaults from left to right, flags over the files; a file changes only what it names.
2. An unknown setting or a value of the wrong type is refused (`ConfigError`), never ignored and never guessed: an `int` passes
   as a `float`, a `bool` never as an `int`, a string never as a number.
3. `from_dict(to_dict(c)) == c` and `from_json(to_json(c)) == c`; both refuse what is missing as well as what is unknown.

Whether the values make sense together is for `validate.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import io
import itertools
import json
import math
import re
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tiderl.config.schema import Config
from tiderl.errors import ConfigError, UserError

_HELP = """Settings of a TideRL job. Each is given in a TOML file, as a flag, or not at all (then the default below holds).

--config FILE [FILE ...]: TOML files, each laid over the ones before it.
--dry-run: check everything, print the plan, start nothing.

All other flags are laid over the files."""


@dataclass(frozen=True)
class LoadedConfig:
    """The resolved settings, the files that they came from (left to right), and whether `--dry-run` was given."""

    config: Config
    sources: tuple[str, ...]
    dry_run: bool


def load(argv: Sequence[str], *, prog: str = "tiderl") -> LoadedConfig:
    """Read `--config FILE …`, `--dry-run` and one flag a setting (`--train.steps 5`) from a command line.

    Raises `ConfigError` for a wrong setting, `UserError` for a file or a flag that cannot be read. `--help` prints every
    setting with its help text and raises `SystemExit(0)`.
    """
    sources, dry_run, flags = _split(argv)
    config = Config()
    for source in sources:
        config = overlay(config, read_toml(source), origin=f" in {source}")
    return LoadedConfig(_apply_flags(config, flags, prog), sources, dry_run)


def read_toml(source: str) -> dict[str, Any]:
    """The tables of a TOML file. Raises `UserError` that names the file, and the line where there is one."""
    try:
        with open(source, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise UserError(
            f"config file {source}: {error.strerror}; give --config a TOML file that can be read"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"config file {source} is not TOML: {error}") from error


def overlay(config: Config, tables: Mapping[str, Any], *, origin: str = "") -> Config:
    """`config` with the settings that `tables` names replaced. Raises `ConfigError`; `origin` says where they are from."""
    return typing.cast(Config, _overlay(config, tables, "", origin))


def to_dict(config: Config) -> dict[str, Any]:
    """All settings as nested dicts, tuples as lists: what JSON and TOML can hold."""
    return typing.cast(dict[str, Any], _plain(config))


def from_dict(tables: Mapping[str, Any]) -> Config:
    """The inverse of `to_dict`. Raises `ConfigError` where a setting is unknown, of the wrong type or missing."""
    given = set(_leaves(tables))
    for path in settings_paths():
        if path not in given:
            raise ConfigError(path, "is missing; a resolved configuration holds every setting")
    return overlay(Config(), tables)


def to_json(config: Config) -> str:
    """All settings as JSON, in the order of the schema. Raises `ValueError` for a number that is not finite."""
    return json.dumps(to_dict(config), indent=2, allow_nan=False)


def from_json(text: str) -> Config:
    """The inverse of `to_json`. Raises `UserError` for text that is not JSON, and what `from_dict` raises."""
    try:
        tables = json.loads(text)
    except ValueError as error:
        raise UserError(f"the resolved configuration is not JSON: {error}") from error
    if not isinstance(tables, dict):
        raise UserError(f"the resolved configuration is a JSON {type(tables).__name__}, not an object")
    return from_dict(tables)


@functools.cache
def settings_paths() -> tuple[str, ...]:
    """The dotted path of every setting, in the order of the schema."""
    return tuple(_leaves(to_dict(Config())))


def _leaves(tables: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tables.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return [_plain(entry) for entry in value] if isinstance(value, tuple) else value


@functools.cache
def _annotations(section: type) -> dict[str, Any]:
    return typing.get_type_hints(section)


def _overlay(section: Any, table: Mapping[str, Any], prefix: str, origin: str) -> Any:
    kind: type = type(section)
    annotations = _annotations(kind)
    changes = {}
    for key, value in table.items():
        path = f"{prefix}{key}"
        if key not in annotations:
            raise ConfigError(path, f"unknown setting{origin}{_did_you_mean(path)}")
        if dataclasses.is_dataclass(annotations[key]):
            if not isinstance(value, Mapping):
                raise ConfigError(path, f"is a section of settings, not {_describe(value)}{origin}")
            changes[key] = _overlay(getattr(section, key), value, f"{path}.", origin)
        else:
            changes[key] = _convert(value, annotations[key], path, origin)
    return dataclasses.replace(section, **changes)


def _convert(value: Any, annotation: Any, path: str, origin: str) -> Any:
    """`value` as TOML or JSON hold it, in the type of a setting. Raises `ConfigError`."""
    if annotation is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if annotation in (bool, int, str) and type(value) is annotation:
        return value
    if typing.get_origin(annotation) is typing.Literal:
        if type(value) is str and value in typing.get_args(annotation):
            return value
    elif typing.get_origin(annotation) is tuple and isinstance(value, list | tuple):
        items = typing.get_args(annotation)
        items = (items[0],) * len(value) if items[1:] == (...,) else items
        if len(items) == len(value):
            pairs = zip(value, items, strict=True)
            return tuple(_convert(entry, item, f"{path}[{i}]", origin) for i, (entry, item) in enumerate(pairs))
    raise ConfigError(path, f"expected {_describe_type(annotation)}, got {_describe(value)}{origin}")


def _describe_type(annotation: Any) -> str:
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) is typing.Literal:
        return "one of " + ", ".join(f'"{choice}"' for choice in arguments)
    if typing.get_origin(annotation) is tuple:
        number = "" if arguments[1:] == (...,) else f"{len(arguments)} "
        return f"a list of {number}{arguments[0].__name__} values"
    return {bool: "true or false", int: "an integer", float: "a finite number", str: "a string"}[annotation]


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return "a section"
    return f"{str(value).lower() if isinstance(value, bool | float) else repr(value)[:64]} ({type(value).__name__})"


def _did_you_mean(path: str) -> str:
    """The nearest setting: a misspelled neighbour or section, then the same name elsewhere, then anything close."""
    known = settings_paths()
    if path in known:
        return f"; {path} is a key in quotes here, write it without"
    section, _, name = path.rpartition(".")
    siblings = [candidate for candidate in known if candidate.rpartition(".")[0] == section]
    sections = [candidate.name for candidate in dataclasses.fields(Config)]
    namesakes = [candidate for candidate in known if candidate.rpartition(".")[2] == name]
    near = (
        difflib.get_close_matches(path, siblings if section else sections, n=1, cutoff=0.7)
        or namesakes
        or difflib.get_close_matches(path, known, n=1, cutoff=0.6)
    )
    return f"; did you mean {near[0]}?" if near else "; --help lists all settings"


def _split(argv: Sequence[str]) -> tuple[tuple[str, ...], bool, list[str]]:
    """Take `--config` with its files and `--dry-run` out of a command line; the rest are settings."""
    sources: list[str] = []
    flags: list[str] = []
    dry_run = False
    arguments = list(argv)
    while arguments:
        argument = arguments.pop(0)
        if argument == "--dry-run":
            dry_run = True
        elif argument.startswith("--config="):
            sources.append(argument.removeprefix("--config="))
        elif argument == "--config":
            if not arguments or arguments[0].startswith("--"):
                raise UserError("--config needs at least one TOML file, such as --config configs/quickstart.toml")
            while arguments and not arguments[0].startswith("--"):
                sources.append(arguments.pop(0))
        else:
            flags.append(argument)
    return tuple(sources), dry_run, flags


def _apply_flags(config: Config, flags: Sequence[str], prog: str) -> Config:
    """Lay flags over `config` with tyro, whose complaints are printed pages; they become one `UserError`."""
    import tyro

    _check_names(flags)
    page = io.StringIO()
    try:
        with contextlib.redirect_stderr(page):
            return tyro.cli(Config, args=flags, default=config, prog=prog, description=_HELP)
    except SystemExit as exit_:
        if not exit_.code:
            raise
        raise UserError(f"command line: {_complaint_in(page.getvalue())}") from None


def _complaint_in(page: str) -> str:
    """The sentence in what tyro prints: a frame with a title, the sentence, a rule, and help; perhaps in color."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).strip(" │") for line in page.splitlines()]
    is_rule = re.compile(r"[-─╭╮╰╯]*").fullmatch
    sentence = itertools.takewhile(lambda line: not is_rule(line), itertools.dropwhile(is_rule, lines[1:]))
    return " ".join(" ".join(sentence).split())


def _check_names(flags: Sequence[str]) -> None:
    known = settings_paths()
    for flag in flags:
        if not flag.startswith("--") or flag == "--help":
            continue
        path = flag.removeprefix("--").partition("=")[0].replace("-", "_")
        # tyro spells "off" as --section.no-name.
        if path not in known and path.replace(".no_", ".", 1) not in known:
            raise ConfigError(path, f"unknown setting on the command line{_did_you_mean(path)}")
