"""The bearer token of environment servers: where it comes from, and where one is needed.

Invariants (tests/unit/test_envs_auth.py):

1. A token file that others may read is refused; so is an empty one.
2. A server that listens beyond this machine has a token.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import stat
from pathlib import Path

from tiderl.errors import UserError

TOKEN_VARIABLE = "TIDERL_ENV_TOKEN"


def read_token(token_file: str) -> str:
    """The token in `token_file`, else in the variable TIDERL_ENV_TOKEN, else "" (no token). Raises `UserError`."""
    if not token_file:
        return _checked(os.environ.get(TOKEN_VARIABLE, "").strip(), f"the variable {TOKEN_VARIABLE}")
    path = Path(token_file)
    try:
        mode = path.stat().st_mode
        token = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"token file {token_file}: cannot be read: {error}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UserError(
            f"token file {token_file}: others may read it (mode {mode & 0o777:04o}); run chmod 600 {token_file}"
        )
    if not token:
        raise UserError(f"token file {token_file}: is empty; it should hold one line, the token")
    return _checked(token, f"token file {token_file}")


def _checked(token: str, where: str) -> str:
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise UserError(f"{where}: a token is one line of printable ASCII without spaces")
    return token


def check_bind(host: str, token: str) -> None:
    """Refuse to serve other machines without a token. Raises `UserError`."""
    if token or host == "localhost":
        return
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise UserError(
            f"refusing to listen on {host} without a token: anyone who reaches it could use it; "
            f"give --token-file (or {TOKEN_VARIABLE}), or listen on 127.0.0.1"
        )


def is_authorized(header: str, token: str) -> bool:
    """Whether an Authorization header carries the token; takes as long for a near miss as for any other."""
    return not token or hmac.compare_digest(header.encode("utf-8", "surrogateescape"), f"Bearer {token}".encode())
