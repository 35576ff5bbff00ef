import pytest


@pytest.fixture(scope="session")
def cases():
    """What needs Lightning, whose import takes seconds."""
    import lightning_cases

    return lightning_cases
