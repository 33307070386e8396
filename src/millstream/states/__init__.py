"""States of training runs: managed steps and strategies, and states of models written with a framework."""
