"""The public path of `Request` for user-written policies; the code is in `state.sequence`."""

from reference_engine.state.sequence import Request as Request
from reference_engine.state.sequence import Sampling as Sampling
from reference_engine.state.sequence import State as State
