import pytest

from tests.grout.fakes import fake_tilert


@pytest.fixture
def fake_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runners work on `FakeDevice`."""
    monkeypatch.setattr("grout.runner.tilert", fake_tilert)
    monkeypatch.setattr("grout.readback.tilert", fake_tilert)
