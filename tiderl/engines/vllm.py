"""`VllmEngine`: the engine protocol over vLLM 0.32, in the rank's process.

`threaded.py` is its asyncio front and its device thread, `vllm_core.py` what runs on it, `vllm_world.py` keeps vLLM's hands off the
host process, `vllm_setup.py` turns a `Config` into vLLM's arguments, `vllm_held.py` keeps blocks between turns, `vllm_scheduler.py`
counts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiderl.engines.threaded import ThreadedEngine
from tiderl.errors import EngineError, TideError

if TYPE_CHECKING:
    from tiderl.engines.vllm_core import ActiveRequest, VllmCore  # noqa: F401 - named in a string


class VllmEngine(ThreadedEngine["ActiveRequest"]):
    """See `tiderl.engines.base.Engine`."""

    def _make_core(self) -> VllmCore:
        from tiderl.engines.vllm_core import VllmCore

        try:
            return VllmCore(self._config)
        except TideError:
            raise
        except Exception as error:  # vLLM raises whatever went wrong inside it
            raise EngineError(
                f"vLLM could not be built for model.path = {self._config.model.path!r}: {error}"
            ) from error
