"""The model that an application serves, under the names its clients use."""

import time
from dataclasses import dataclass, field

from server.errors import ApiError
from server.metrics import Metrics
from server.protocol import ServingEngine
from server.settings import Settings

__all__ = ["Served", "served_name"]


def served_name(engine: ServingEngine) -> str:
    """The model name of an engine where nothing else was asked for."""
    return engine.config.served_model_name or engine.model_id


@dataclass(frozen=True)
class Served:
    """An engine and what the routes say of it; created: Unix seconds."""

    engine: ServingEngine
    settings: Settings
    metrics: Metrics
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def names(self) -> tuple[str, ...]:
        """The model names that requests may give."""
        return self.settings.names or (served_name(self.engine),)

    def check_name(self, name: str | None) -> str:
        """Return the name to answer under; raises ApiError 404 for any other model.

        A request may leave the name out.
        """
        if name is None:
            return self.names[0]
        if name not in self.names:
            shown = name if len(name) <= 200 else name[:197] + "..."
            known = ", ".join(f"'{known}'" for known in self.names)
            raise ApiError(
                404,
                f"The model '{shown}' does not exist here; this server has {known}.",
                code="model_not_found",
                param="model",
            )
        return name
