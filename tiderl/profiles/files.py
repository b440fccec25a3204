"""Profiles from TOML files, strictly: every key that the schema has, and no other.

Invariants (tests/unit/test_profiles_files.py):

1. An unknown or missing key, a value of the wrong type, one that is not finite or not positive is a `ConfigError` that names the
   file and the key and says what would be right. An `int` passes as a `float`, a `bool` never as a number.
2. Figures that follow from others must agree with them: KV bytes a token, a tied head, the state of linear attention.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from tiderl.errors import ConfigError
from tiderl.profiles.costs import CostModel
from tiderl.profiles.schema import Efficiency, HardwareProfile, ModelProfile

ProfileT = TypeVar("ProfileT", HardwareProfile, ModelProfile, Efficiency)

_MAY_BE_ZERO = frozenset({"vision_parameters", "state_bytes_per_sequence", "step_overhead_s"})
_KINDS = {int: "an integer", float: "a number", str: "a string", bool: "true or false", Efficiency: "a section"}


def load(hardware_path: str | Path, model_path: str | Path) -> CostModel:
    """The costs of a model on a GPU. Raises `ConfigError`."""
    return CostModel(load_hardware(hardware_path), load_model(model_path))


def load_hardware(path: str | Path) -> HardwareProfile:
    """Raises `ConfigError`; see the module docstring."""
    hardware = _read(HardwareProfile, _tables(path), str(path), "")
    for name, value in dataclasses.asdict(hardware.efficiency).items():
        if name != "step_overhead_s" and value > 1:
            raise ConfigError(
                f"{path}: efficiency.{name}", f"{value:g} is more than all; give a share of the peak in (0, 1]"
            )
    return hardware


def load_model(path: str | Path) -> ModelProfile:
    """Raises `ConfigError`; see the module docstring."""
    model = _read(ModelProfile, _tables(path), str(path), "")
    _check_parameters(model, path)
    _check_attention(model, path)
    return model


def _tables(path: str | Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise ConfigError(str(path), f"{error.strerror}; give a profile, such as one of configs/profiles/") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"is not TOML: {error}") from error


def _read(kind: type[ProfileT], table: Mapping[str, Any], file: str, section: str) -> ProfileT:
    types = typing.get_type_hints(kind)
    for key in table:
        if key not in types:
            raise ConfigError(f"{file}: {section}{key}", f"unknown key; known are {', '.join(types)}")
    values = {}
    for key, wanted in types.items():
        where = f"{file}: {section}{key}"
        if key not in table:
            raise ConfigError(where, f"is missing; give {_KINDS[wanted]}")
        values[key] = _value(wanted, table[key], where, key in _MAY_BE_ZERO, file)
    return kind(**values)


def _value(wanted: type, value: Any, where: str, may_be_zero: bool, file: str) -> Any:
    if wanted is Efficiency and isinstance(value, Mapping):
        return _read(Efficiency, value, file, "efficiency.")
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        raise ConfigError(where, f"is {value!r}; give {_KINDS[wanted]}")
    if isinstance(value, int | float) and wanted is not bool:
        if not math.isfinite(value):
            raise ConfigError(where, f"is {value!r}; give a finite number")
        if value < 0 or (value == 0 and not may_be_zero):
            raise ConfigError(where, f"is {value!r}; give a number {'of 0 or more' if may_be_zero else 'above 0'}")
    return value


def _check_parameters(model: ModelProfile, path: str | Path) -> None:
    if model.tied and model.head_parameters != model.embedding_parameters:
        raise ConfigError(
            f"{path}: head_parameters",
            f"is {model.head_parameters}, but a tied head is the embedding: give {model.embedding_parameters}, or tied = false",
        )
    if model.head_parameters % model.hidden_size:
        raise ConfigError(
            f"{path}: head_parameters",
            f"is {model.head_parameters}; give vocabulary x hidden_size ({model.hidden_size})",
        )
    if model.layer_parameters <= 0:
        raise ConfigError(
            f"{path}: num_parameters",
            f"is {model.num_parameters}, which leaves none to the layers; it counts embedding, head and vision tower too",
        )


def _check_attention(model: ModelProfile, path: str | Path) -> None:
    if model.num_full_attention_layers > model.num_layers:
        raise ConfigError(
            f"{path}: num_full_attention_layers",
            f"is {model.num_full_attention_layers}; give at most num_layers ({model.num_layers})",
        )
    if model.num_query_heads % model.num_kv_heads:
        raise ConfigError(
            f"{path}: num_kv_heads",
            f"is {model.num_kv_heads}; give a divisor of num_query_heads ({model.num_query_heads})",
        )
    # A key and a value of every head in every layer that has a cache.
    kv_bytes = 2 * model.num_full_attention_layers * model.kv_width * model.dtype_bytes
    if model.kv_bytes_per_token != kv_bytes:
        raise ConfigError(
            f"{path}: kv_bytes_per_token",
            f"is {model.kv_bytes_per_token}; give {kv_bytes}, which is "
            "2 x num_full_attention_layers x num_kv_heads x head_dim x dtype_bytes",
        )
    if (model.state_bytes_per_sequence > 0) != (model.num_full_attention_layers < model.num_layers):
        raise ConfigError(
            f"{path}: state_bytes_per_sequence",
            f"is {model.state_bytes_per_sequence} with {model.num_layers - model.num_full_attention_layers} layers of linear "
            "attention; give 0 where there are none, and their state's bytes otherwise",
        )
