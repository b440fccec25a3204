"""The token of environment servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiderl.envs.auth import check_bind, is_authorized, read_token
from tiderl.errors import UserError


def token_file(folder: Path, text: str, mode: int = 0o600) -> str:
    path = folder / "token"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_the_file_comes_before_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDERL_ENV_TOKEN", raising=False)
    assert read_token("") == ""
    monkeypatch.setenv("TIDERL_ENV_TOKEN", "from-the-variable\n")
    assert read_token("") == "from-the-variable"
    assert read_token(token_file(tmp_path, " from-the-file\n")) == "from-the-file"


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_a_file_that_others_may_touch_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(UserError, match="chmod 600"):
        read_token(token_file(tmp_path, "secret", mode))


@pytest.mark.parametrize("text", ["", " \n", "two words", "two\nlines", "sécret"])
def test_a_file_without_a_proper_token_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError, match="token"):
        read_token(token_file(tmp_path, text))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        read_token(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_token(host: str) -> None:
    check_bind(host, "")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "", "node17.cluster", "127.0.0.1.example.org"])
def test_other_addresses_need_one(host: str) -> None:
    with pytest.raises(UserError, match="--token-file"):
        check_bind(host, "")
    check_bind(host, "secret")


def test_authorization() -> None:
    assert is_authorized("", "")
    assert is_authorized("Bearer secret", "secret")
    for header in ("", "secret", "Bearer ", "bearer secret", "Bearer secret ", "Bearer secre", "Bearer s\udcffcret"):
        assert not is_authorized(header, "secret")
