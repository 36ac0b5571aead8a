"""Command-line flags as a frozen model: flag `--max-num-seqs` is field `max_num_seqs`; flags > K3MESH_… > --config file."""

import argparse
import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn, Self, cast, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, EnvSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from k3mesh.errors import ConfigError

ENV_PREFIX = "K3MESH_"


def refusal(field: str, value: object, rule: str, remedy: str) -> ConfigError:
    """The one form of a start-up refusal: `--flag VALUE: rule; remedy`."""
    return ConfigError(f"{flag(field)} {spell(value)}: {rule}; {remedy}", param=field)


def flag(field: str) -> str:
    return "--" + field.replace("_", "-")


def spell(value: object) -> str:
    """A value as a person types it after its flag."""
    if isinstance(value, tuple | list):
        return ",".join(str(item) for item in cast("tuple[object, ...]", value))
    return str(value)


def _split(value: object) -> object:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _address(value: str) -> str:
    host, colon, port = value.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 65536):
        raise ValueError("must be HOST:PORT")
    return value


Integers = Annotated[tuple[int, ...], BeforeValidator(_split)]


def split_address(address: str) -> tuple[str, int]:
    """Host and port of an Address."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


Address = Annotated[str, AfterValidator(_address)]
Addresses = Annotated[tuple[Address, ...], BeforeValidator(_split)]
Words = Annotated[tuple[str, ...], BeforeValidator(_split)]


class FlagSet(BaseSettings):
    """Base of every process's arguments. Built by `parse` only, so that all refusals have one form."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, enable_decoding=False, frozen=True, extra="forbid", validate_default=False
    )
    aliases: ClassVar[dict[str, str]] = {}  # other spellings of a flag → field

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *others: object, **more: object
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)  # parse() merges the layers itself: it must know where a wrong value came from

    @classmethod
    def parse(cls, argv: list[str], program: str | None = None) -> Self:
        """Read flags, environment and --config file. ConfigError names flag, value, rule and remedy; --help exits 0."""
        given = _read_argv(cls, argv, program)
        file = given.pop("config", None)
        layers = [(f"{file}: ", " = ", _read_file(cls, Path(file)) if file else {})]
        layers.append((ENV_PREFIX, "=", EnvSettingsSource(cls)()))
        layers.append(("--", " ", given))
        values: dict[str, Any] = {}
        labels: dict[str, str] = {}
        for prefix, equals, layer in layers:
            for field, value in layer.items():
                values[field] = value
                name = field.upper() if prefix == ENV_PREFIX else field.replace("_", "-")
                labels[field] = f"{prefix}{name}{equals}{spell(value)}"
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise _translate(cls, error.errors()[0], labels) from None

    def fill(self, derived: Mapping[str, Any]) -> None:
        """Give unset fields their derived values; for validators that run before anyone else sees the object."""
        for field, value in derived.items():
            object.__setattr__(self, field, value)

    def argv(self, of: "type[FlagSet] | None" = None) -> list[str]:
        """These arguments, or those that base class `of` declares, as flags. For a child without a K3MESH_ environment
        parse(x.argv()) == x."""
        words: list[str] = []
        for field, info in (of or type(self)).model_fields.items():
            value = getattr(self, field)
            if value == info.default:
                continue
            if isinstance(value, bool):
                words.append(flag(field) if value else "--no-" + flag(field)[2:])
            elif spell(value).startswith("-"):
                words.append(f"{flag(field)}={spell(value)}")
            else:
                words += [flag(field), spell(value)]
        return words


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')}; --help lists all flags")


def _read_argv(cls: type[FlagSet], argv: list[str], program: str | None) -> dict[str, Any]:
    """Flags that are there, values still as text. Unknown ones are refused with the nearest known one."""
    parser = _Parser(prog=program, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.add_argument("--config", metavar="FILE", help="TOML file with flag = value lines; flags and environment win over it")
    known = ["--config"]
    for field, info in cls.model_fields.items():
        names = [flag(field), *(f"--{alias}" for alias, of in cls.aliases.items() if of == field)]
        known += names
        text = (info.description or "").replace("%", "%%")
        if info.annotation is bool:
            parser.add_argument(*names, dest=field, action=argparse.BooleanOptionalAction, help=text)
        else:
            parser.add_argument(*names, dest=field, metavar=_metavar(info.annotation), help=text)
    found, unknown = parser.parse_known_args(argv)
    if unknown:
        near = difflib.get_close_matches(unknown[0].split("=")[0], known, n=1)
        remedy = f"did you mean {near[0]}?" if near else "--help lists all flags"
        raise ConfigError(f"{unknown[0]}: unknown flag; {remedy}", param=unknown[0].lstrip("-").replace("-", "_"))
    return vars(found)


def _metavar(annotation: object) -> str:
    options = _choices(annotation)
    if options:
        return "{" + ",".join(options) + "}"
    return {int: "N", float: "X"}.get(cast(Any, annotation), "VALUE")


def _choices(annotation: object) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(option) for option in get_args(annotation)]
    return [option for part in get_args(annotation) for option in _choices(part)]


def _read_file(cls: type[FlagSet], path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"--config {path}: cannot be read as TOML ({error}); give a file of flag = value lines") from None
    values = {name.replace("-", "_"): value for name, value in content.items()}
    for field in values:
        if field not in cls.model_fields:
            raise ConfigError(f"--config {path}: unknown flag {field.replace('_', '-')}; --help lists all flags", param=field)
    return values


def _translate(cls: type[FlagSet], error: ErrorDetails, labels: Mapping[str, str]) -> ConfigError:
    """pydantic's first finding in our form."""
    field = str(error["loc"][0])
    label = labels.get(field, flag(field))
    context = error.get("ctx", {})
    text = f"it means: {cls.model_fields[field].description}"
    match error["type"]:
        case "missing":
            rule = "is required"
        case "literal_error":
            rule, text = "no such choice", "give one of " + ", ".join(_choices(cls.model_fields[field].annotation))
        case "int_parsing" | "int_type" | "int_from_float":
            rule = "must be a whole number"
        case "float_parsing" | "float_type":
            rule = "must be a number"
        case "bool_parsing" | "bool_type":
            rule = "must be true or false"
        case "greater_than_equal":
            rule = f"must be at least {context['ge']}"
        case "greater_than":
            rule = f"must be above {context['gt']}"
        case "less_than_equal":
            rule = f"must be at most {context['le']}"
        case "value_error":
            rule = str(context["error"])
        case _:
            rule = error["msg"]
    return ConfigError(f"{label}: {rule}; {text}", param=field)
