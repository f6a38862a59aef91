"""Every layer that works on this machine."""

import pytest
from confined_processes import CONFINING, LIMITS

from rewards.confinement.choice import examine
from rewards.confinement.sandbox import ConfinementError, Sandbox


@pytest.fixture(scope="module", params=CONFINING)
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    """One that the examination found closed."""
    sandbox = Sandbox(layer=request.param, limits=LIMITS)
    try:
        opened = examine(sandbox)
    except ConfinementError as error:
        pytest.skip(str(error))
    assert opened == ()
    return sandbox
