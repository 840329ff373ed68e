"""The model that an application serves, under the name its clients use."""

import time
from dataclasses import dataclass, field

from server.errors import ApiError
from server.protocol import ServingEngine

__all__ = ["Served"]


@dataclass(frozen=True)
class Served:
    """An engine and what the routes say of it; created: Unix seconds."""

    engine: ServingEngine
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        """The one model name that requests may give."""
        return self.engine.config.served_model_name or self.engine.model_id

    def check_name(self, name: str | None) -> None:
        """Raise ApiError 404 for any other model; a request may leave the name out."""
        if name is not None and name != self.name:
            shown = name if len(name) <= 200 else name[:197] + "..."
            raise ApiError(
                404,
                f"The model '{shown}' does not exist here; this server has '{self.name}'.",
                code="model_not_found",
                param="model",
            )
