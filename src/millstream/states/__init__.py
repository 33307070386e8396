"""States of training runs: managed steps and strategies."""

from millstream.states import managed as managed
