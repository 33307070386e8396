"""States of training runs: managed steps and strategies, and states of models written with a framework."""

from millstream.states import managed as managed
from millstream.states._equinox import create_equinox_state as create_equinox_state
from millstream.states._haiku import create_haiku_state as create_haiku_state
from millstream.states._linen import create_flax_state as create_flax_state
from millstream.states._nnx import create_nnx_state as create_nnx_state
