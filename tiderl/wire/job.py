"""What every process of a job is told at its start: the settings, the folders, and how to reach the coordinator.

Rank 0's launcher makes it and hands it to its worker over a pipe; that worker puts it into torchrun's store, where the others
find it. It holds the clients' keys, so it is never written to a file, a log or a command line. The store itself is torchrun's:
unencrypted, and open to whoever reaches its port; a job trusts the network between its nodes that far.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from tiderl.config.load import from_json, to_json
from tiderl.config.schema import Config
from tiderl.errors import WireError
from tiderl.wire.sockets import ClientKeys


@dataclass(frozen=True, slots=True)
class Job:
    """One start of a job (a restart makes a new one). Paths are absolute; `port` and `keys` are the running coordinator's."""

    config: Config
    world_size: int
    run_dir: Path
    #: Checkpoint folder (`…/checkpoints/step_000020`) to go on from, or None.
    resume_dir: Path | None
    #: Where the coordinator listens, and under which name the workers find it.
    bind_host: str
    connect_host: str
    #: 0 and None until the coordinator has started.
    port: int = 0
    keys: ClientKeys | None = None

    @property
    def address(self) -> str:
        """`host:port` of the coordinator, for workers."""
        return f"{self.connect_host}:{self.port}"

    def to_json(self) -> str:
        """One line of JSON, keys included."""
        return json.dumps(
            {
                "config": to_json(self.config),
                "world_size": self.world_size,
                "run_dir": str(self.run_dir),
                "resume_dir": str(self.resume_dir) if self.resume_dir else None,
                "bind_host": self.bind_host,
                "connect_host": self.connect_host,
                "port": self.port,
                "keys": dataclasses.asdict(self.keys) if self.keys else None,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Raises `WireError` for anything that `to_json` did not write."""
        try:
            fields = json.loads(text)
            return cls(
                config=from_json(fields["config"]),
                world_size=fields["world_size"],
                run_dir=Path(fields["run_dir"]),
                resume_dir=Path(fields["resume_dir"]) if fields["resume_dir"] else None,
                bind_host=fields["bind_host"],
                connect_host=fields["connect_host"],
                port=fields["port"],
                keys=ClientKeys(**fields["keys"]) if fields["keys"] else None,
            )
        except (ValueError, KeyError, TypeError) as error:
            raise WireError(
                f"the job's description cannot be read: {error!r}; are all ranks of the same version?"
            ) from error
