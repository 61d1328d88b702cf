"""What every test of loading may ask for."""

from tests.cli.conftest import one_thread  # noqa: F401
